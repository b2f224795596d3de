"""`akvcache demo`: a real model answers one long prompt twice, in two processes that share nothing but a folder."""
