//! Muster
pub mod cli;
pub mod clock;
pub mod config;
pub mod coordination;
pub mod engine;
pub mod grpc;
pub mod http;
pub mod proto;
pub mod telemetry;
pub mod text;
