//! The provider of libfabric over which tests read memory. It needs no network card.

/// Returns the provider over TCP that stands up to connections that end in traffic: in libfabric 1.17 `tcp;ofi_rxm` and `net` crash then.
pub fn fabric_over_tcp() -> &'static str {
    let version = muster_fabric::library_version().expect("tests/run installs libfabric");
    if version < (1, 18) { "sockets" } else { "tcp" }
}
