"""From a plan of the scheduler to the tensors of one forward."""
