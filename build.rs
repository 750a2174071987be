//! Generates the protocol types and the descriptor set that server reflection
//! serves. Compiled by protox: no protoc needed on the machine.

use std::path::PathBuf;

use prost::Message as _;

const PROTOS: [&str; 9] = [
    "tensorflow_coordination.proto",
    "xla_coordination.proto",
    "status_payload.proto",
    "xla_topology.proto",
    "muster_collectives.proto",
    "muster_task_claims.proto",
    "muster_peer_jobs.proto",
    "muster_stacks.proto",
    "muster_transfers.proto",
];

fn main() -> Result<(), Box<dyn std::error::Error>> {
    println!("cargo:rerun-if-changed=proto");
    let descriptors = protox::compile(PROTOS, ["proto"])?;
    let out = PathBuf::from(std::env::var("OUT_DIR")?);
    std::fs::write(out.join("descriptors.bin"), descriptors.encode_to_vec())?;
    // Servers are not generated: the calls are dispatched by the gRPC port itself, which needs
    // the bytes of a request before they are a message. Clients are for tools and tests.
    tonic_prost_build::configure()
        .build_server(false)
        .build_transport(false)
        .bytes(".")
        .btree_map(".")
        // A task on the wire is an id and a word on how the client spells it; see the type.
        .extern_path(".tensorflow.CoordinatedTask", "crate::proto::CoordinatedTask")
        .compile_fds(descriptors)?;
    Ok(())
}
