"""The stages that turn a model pair into a scheduler and a report; ``pipeline --help`` lists them."""
