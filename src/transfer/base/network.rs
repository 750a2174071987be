//! The client network of an address, by which limits count.
//!
//! It keeps no limits itself. Begin at [`source_network`].

use std::net::IpAddr;

/// Returns the network that one host has for itself: an IPv4 address, or of IPv6 the first 64 bits, since a host that
/// has one IPv6 address has a whole network of them.
#[must_use]
pub fn source_network(address: IpAddr) -> IpAddr {
    match address.to_canonical() {
        IpAddr::V6(address) => IpAddr::V6((address.to_bits() >> 64 << 64).into()),
        address => address,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn addresses_of_one_ipv6_network_are_one_source_and_others_are_their_own() {
        let of = |text: &str| source_network(text.parse().unwrap()).to_string();
        assert_eq!(of("2001:db8::ffff:1"), "2001:db8::");
        assert_ne!(of("2001:db8::1"), of("2001:db8:0:1::1"));
        assert_eq!(of("::ffff:10.0.0.1"), "10.0.0.1");
        assert_eq!(of("10.0.0.1"), "10.0.0.1");
    }
}
