//! The client network of an address: the IPv4 address itself, or the 64 leading bits of an IPv6 address. Limits on
//! connections and handshakes count each client network separately.
//!
//! Other modules enforce the limits. Begin at [`client_subnet`].

use std::net::IpAddr;

/// Returns the network of one client host: an IPv4 address as it is, or the first 64 bits of an IPv6 address,
/// because a host that has one IPv6 address usually has its whole /64 network.
#[must_use]
pub fn client_subnet(address: IpAddr) -> IpAddr {
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
        let of = |text: &str| client_subnet(text.parse().unwrap()).to_string();
        assert_eq!(of("2001:db8::ffff:1"), "2001:db8::");
        assert_ne!(of("2001:db8::1"), of("2001:db8:0:1::1"));
        assert_eq!(of("::ffff:10.0.0.1"), "10.0.0.1");
        assert_eq!(of("10.0.0.1"), "10.0.0.1");
    }
}
