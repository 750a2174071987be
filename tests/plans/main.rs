//! Transfer plans, compared with naive computations of what they should be.

mod balance;
mod documents;
mod hostile;
mod jax;
mod large;
mod properties;
mod shapes;
mod support;
