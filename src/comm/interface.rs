//! Addresses of this host's network interfaces.

use std::net::{IpAddr, Ipv4Addr, ToSocketAddrs as _};

use if_addrs::get_if_addrs;

use super::transport::tcp::host_name;
use hpctrain_base::error::{Error, Result};

/// Returns the address at which other hosts reach this one: that of `interface`
/// (`comm.interface`), else the one that this host's name stands for, else that of the first
/// interface which has one.
///
/// # Errors
/// Returns an error if this host has no such interface.
pub fn host_address(interface: Option<&str>) -> Result<IpAddr> {
    if let Some(interface) = interface {
        return address_of(interface);
    }
    let here: Vec<IpAddr> =
        get_if_addrs().unwrap_or_default().into_iter().map(|one| one.ip()).collect();
    // The name of a host need not resolve, or resolves to another host or the loopback interface.
    let named = (host_name().as_str(), 0).to_socket_addrs().into_iter().flatten();
    let named = named.map(|address| address.ip()).find(|ip| !ip.is_loopback() && here.contains(ip));
    let first = || here.iter().copied().find(|ip| !ip.is_loopback() && ip.is_ipv4());
    Ok(named.or_else(first).unwrap_or(Ipv4Addr::LOCALHOST.into()))
}

/// Returns the address of an interface: `interface` is its name, or a network that contains its
/// address, such as `10.1.0.0/16`. IPv4 addresses are preferred to IPv6 addresses; link-local
/// addresses are ignored.
///
/// # Errors
/// Returns an error if this host has no such interface.
pub fn address_of(interface: &str) -> Result<IpAddr> {
    let all = get_if_addrs()
        .map_err(|e| Error::comm(format!("cannot list the network interfaces: {e}")))?;
    let all: Vec<(String, IpAddr)> = all
        .into_iter()
        .map(|interface| (interface.name.clone(), interface.ip()))
        .filter(|(_, ip)| match ip {
            IpAddr::V4(ip) => !ip.is_link_local(),
            IpAddr::V6(ip) => !ip.is_unicast_link_local(),
        })
        .collect();
    let network = network(interface);
    let matches = |(name, ip): &&(String, IpAddr)| match network {
        Some((network, bits)) => contains(network, bits, *ip),
        None => name == interface,
    };
    let found = all.iter().filter(matches).map(|(_, ip)| *ip).min_by_key(IpAddr::is_ipv6);
    found.ok_or_else(|| {
        let names: Vec<String> = all.iter().map(|(name, ip)| format!("{name} ({ip})")).collect();
        let what = if network.is_some() { "interface in the network" } else { "interface" };
        Error::input(format!("comm.interface: {} has no {what} {interface:?}", host_name())).hint(
            format!(
                "it has {}; a network such as \"10.1.0.0/16\" works on hosts where its name differs",
                names.join(", ")
            ),
        )
    })
}

/// Parses a network such as `10.1.0.0/16`: its address and the length of its prefix.
fn network(text: &str) -> Option<(IpAddr, u32)> {
    let (address, bits) = text.split_once('/')?;
    let address: IpAddr = address.parse().ok()?;
    let bits: u32 = bits.parse().ok()?;
    (bits <= if address.is_ipv4() { 32 } else { 128 }).then_some((address, bits))
}

/// Returns whether the first `bits` bits of an address are those of `network`.
fn contains(network: IpAddr, bits: u32, ip: IpAddr) -> bool {
    let differ = match (network, ip) {
        (IpAddr::V4(network), IpAddr::V4(ip)) => {
            (network.to_bits() ^ ip.to_bits()).checked_shr(32 - bits).unwrap_or(0).into()
        }
        (IpAddr::V6(network), IpAddr::V6(ip)) => {
            (network.to_bits() ^ ip.to_bits()).checked_shr(128 - bits).unwrap_or(0)
        }
        _ => 1,
    };
    differ == 0
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_host_has_an_address() {
        assert!(host_address(Some("lo")).unwrap().is_loopback());
        assert!(host_address(Some("no-such-interface")).is_err());
        std::net::TcpListener::bind((host_address(None).unwrap(), 0)).unwrap();
    }

    #[test]
    fn networks_contain_their_addresses() {
        for (text, ip, expected) in [
            ("10.1.0.0/16", "10.1.255.3", Some(true)),
            ("10.1.0.0/16", "10.2.0.1", Some(false)),
            ("0.0.0.0/0", "10.2.0.1", Some(true)),
            ("10.2.0.1/32", "10.2.0.1", Some(true)),
            ("2001:db8::/32", "2001:db8:7::1", Some(true)),
            ("2001:db8::/32", "10.2.0.1", Some(false)),
            ("::/0", "2001:db8:7::1", Some(true)),
            ("10.1.0.0/33", "10.1.0.1", None),
            ("eth0", "10.1.0.1", None),
        ] {
            let address = ip.parse().unwrap();
            let found = network(text).map(|(network, bits)| contains(network, bits, address));
            assert_eq!(found, expected, "{text} {ip}");
        }
    }
}
