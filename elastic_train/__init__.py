"""elastic_train: a PyTorch trainer that keeps training while machines come and go."""

__version__ = "0.1.0"
