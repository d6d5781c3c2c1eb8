"""How workers are started and find each other: the hook in torchrun's agent, what a worker reads of it, etcd."""
