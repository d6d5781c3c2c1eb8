"""Where the entry points of an older editable install still look."""

from elastic_train.rendezvous.hook import etcd3_backend, prepare_agent

__all__ = ["etcd3_backend", "prepare_agent"]
