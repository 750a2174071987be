//! Muster
pub mod clock;
pub mod coordination;
pub mod engine;
pub mod grpc;
pub mod proto;
