//! Tests of transfer plans. A naive computation of the expected result checks each plan.

mod balance;
mod documents;
mod hostile;
mod jax;
mod large;
mod properties;
mod shapes;
mod support;
