"""Doors from serving engines and model libraries into akvcache; each module needs the library it is named after."""
