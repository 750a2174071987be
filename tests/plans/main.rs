//! Plans of transfers, held against naive ways to find out what they should be.

mod balance;
mod documents;
mod hostile;
mod jax;
mod large;
mod properties;
mod shapes;
mod support;
