//! Addresses of the coordinator and servers: where they listen, and where other processes reach
//! them.

use std::io::ErrorKind;
use std::net::{
    IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, TcpListener, TcpStream, ToSocketAddrs as _,
};
use std::time::Duration;

use hpctrain_base::error::{Error, Result};
use hpctrain_comm::host_name;
use hpctrain_comm::interface::address_of;

/// Starts to listen, and returns the address at which others reach the listener. `requested` is
/// `parameter_server.address`: a host, a host with a port, or a port as in `:2222`.
///
/// If `requested` has an IP address, the listener binds to it. Otherwise it binds to the address of
/// `interface` (`comm.interface`), or without an interface to the address that this host's name
/// resolves to; if no interface has that address (127.0.1.1, for instance), to all addresses.
///
/// # Errors
/// Returns an error if the address is in use or of another host, or there is no such interface.
pub fn listen(requested: Option<&str>, interface: Option<&str>) -> Result<(TcpListener, String)> {
    let (host, port) = requested.map_or(Ok((None, 0)), parse)?;
    // A host name is only for others: in a container it may resolve to the address of another host,
    // which forwards connections.
    let ip = host.as_deref().and_then(|host| host.parse::<IpAddr>().ok());
    let (listener, known_as) = match (ip, interface) {
        (Some(ip), _) => (bind(ip, port)?, ip.to_string()),
        (None, Some(interface)) => {
            let ip = address_of(interface)?;
            (bind(ip, port)?, ip.to_string())
        }
        (None, None) => (listen_by_name(port)?, host_name()),
    };
    let local = listener.local_addr().map_err(|e| Error::comm(e.to_string()))?;
    let address = joined(&host.unwrap_or(known_as), local.port());
    log::info!("listening on {local}, reachable at {address}");
    Ok((listener, address))
}

fn bind(ip: IpAddr, port: u16) -> Result<TcpListener> {
    TcpListener::bind((ip, port)).map_err(|e| refused(SocketAddr::new(ip, port), &e))
}

fn refused(address: SocketAddr, e: &std::io::Error) -> Error {
    Error::input(format!("cannot listen on {address}: {e}"))
        .hint("set parameter_server.address to a free address of this host, or omit it")
}

/// Listens on the first address that this host's name resolves to and an interface has, else on all
/// addresses.
fn listen_by_name(port: u16) -> Result<TcpListener> {
    // The name of a host need not resolve.
    for address in (host_name().as_str(), port).to_socket_addrs().into_iter().flatten() {
        if address.ip().is_loopback() {
            continue;
        }
        match TcpListener::bind(address) {
            Ok(listener) => return Ok(listener),
            // The name resolves to another host, such as one that forwards connections.
            Err(e) if e.kind() == ErrorKind::AddrNotAvailable => {}
            Err(e) => return Err(refused(address, &e)),
        }
    }
    log::info!(
        "the name {} does not resolve to an interface of this host: listening on all interfaces",
        host_name()
    );
    // An IPv6 listener accepts IPv4 connections, too, but a system may lack IPv6.
    TcpListener::bind((Ipv6Addr::UNSPECIFIED, port))
        .or_else(|_| bind(Ipv4Addr::UNSPECIFIED.into(), port))
}

/// Parses host and port of an address; a missing host is none, a missing port 0. An IPv6 address
/// before a port is in brackets.
fn parse(address: &str) -> Result<(Option<String>, u16)> {
    let (host, port) = split(address).ok_or_else(|| {
        Error::input(format!("parameter_server.address = {address:?} is not a host with a port"))
            .hint("such as \"node7\", \"10.0.0.7:2222\", \"[2001:db8::7]:2222\" or \":2222\"")
    })?;
    Ok((Some(host).filter(|host| !host.is_empty()).map(Into::into), port))
}

/// Returns the host of an address, which may be empty, and its port, or 0 without one; none if the
/// address is malformed.
fn split(address: &str) -> Option<(&str, u16)> {
    if address.parse::<IpAddr>().is_ok() {
        return Some((address, 0));
    }
    let (host, port) = match address.strip_prefix('[') {
        Some(rest) => {
            let (host, port) = rest.split_once(']')?;
            host.parse::<Ipv6Addr>().ok()?;
            (host, if port.is_empty() { "0" } else { port.strip_prefix(':')? })
        }
        None => address.rsplit_once(':').unwrap_or((address, "0")),
    };
    Some((host, port.parse().ok().filter(|_| !host.contains(':') || address.starts_with('['))?))
}

/// Returns the host of an address without its port, which only one process can use.
pub fn host_of(address: &str) -> Option<String> {
    // An address that cannot be parsed is refused by `listen`.
    parse(address).map_or_else(|_| Some(address.into()), |(host, _)| host)
}

/// Joins host and port to one address.
fn joined(host: &str, port: u16) -> String {
    if host.contains(':') { format!("[{host}]:{port}") } else { format!("{host}:{port}") }
}

/// Connects to an address that [`listen`] returned, on this host or another.
///
/// # Errors
/// Returns an error if the host does not resolve, or nothing listens at the address.
pub fn connect(address: &str, timeout: Duration) -> Result<TcpStream> {
    let (Some(host), port) = parse(address)? else {
        return Err(Error::comm(format!("{address:?} has no host")));
    };
    let resolved: std::io::Result<Vec<SocketAddr>> =
        (host.as_str(), port).to_socket_addrs().map(Iterator::collect);
    let found = match resolved {
        // The name of this host may not resolve, or only to a loopback address.
        found if host == host_name() => {
            let loopback: [IpAddr; 2] = [Ipv4Addr::LOCALHOST.into(), Ipv6Addr::LOCALHOST.into()];
            found
                .unwrap_or_default()
                .into_iter()
                .chain(loopback.map(|ip| SocketAddr::new(ip, port)))
                .collect()
        }
        Ok(found) => found,
        Err(e) => {
            return Err(Error::comm(format!("{host} does not resolve: {e}")).hint(
                "set parameter_server.address to an address that all hosts resolve, or set comm.interface",
            ));
        }
    };
    let mut first = None;
    for candidate in found {
        match TcpStream::connect_timeout(&candidate, timeout) {
            Ok(stream) => {
                stream.set_nodelay(true).map_err(|e| Error::comm(e.to_string()))?;
                return Ok(stream);
            }
            Err(e) => drop(first.get_or_insert_with(|| Error::comm(format!("{address}: {e}")))),
        }
    }
    Err(first.unwrap_or_else(|| Error::comm(format!("{host} has no address"))))
}

#[cfg(test)]
mod tests {
    use super::*;

    const TIMEOUT: Duration = Duration::from_secs(5);

    #[test]
    fn addresses_are_read() {
        let host = |host: &str, port| (Some(host.to_owned()), port);
        for (address, expected) in [
            ("node7", host("node7", 0)),
            ("node7:2222", host("node7", 2222)),
            (":2222", (None, 2222)),
            ("10.0.0.7", host("10.0.0.7", 0)),
            ("10.0.0.7:2222", host("10.0.0.7", 2222)),
            ("2001:db8::7", host("2001:db8::7", 0)),
            ("[2001:db8::7]", host("2001:db8::7", 0)),
            ("[2001:db8::7]:2222", host("2001:db8::7", 2222)),
        ] {
            let parsed = parse(address).unwrap();
            assert_eq!(parsed, expected, "{address}");
            if let (Some(host), port) = parsed {
                assert_eq!(parse(&joined(&host, port)).unwrap(), (Some(host), port), "{address}");
            }
        }
        for wrong in ["a:b", "a:b:1", "[::1", "[::1]2222", "[node7]:1", "::x:1", "node7:70000"] {
            assert!(
                parse(wrong).unwrap_err().to_string().contains("is not a host with a port"),
                "{wrong}"
            );
        }
        assert_eq!(host_of("[::1]:3"), Some("::1".into()));
        assert_eq!(host_of(":3"), None);
    }

    #[test]
    fn listeners_are_reachable() {
        let (_listener, address) = listen(None, None).unwrap();
        connect(&address, TIMEOUT).unwrap();
        let (listener, address) = listen(Some("127.0.0.1"), Some("no-such-interface")).unwrap();
        let port = listener.local_addr().unwrap().port();
        assert_eq!(address, format!("127.0.0.1:{port}"));
        connect(&address, TIMEOUT).unwrap();
        let error = listen(Some(&address), None).unwrap_err().to_string();
        assert!(
            error.contains(&format!("cannot listen on 127.0.0.1:{port}: Address already in use")),
            "{error}"
        );
        let error = connect("no-such-host.invalid:1", TIMEOUT).unwrap_err().to_string();
        assert!(error.contains("no-such-host.invalid does not resolve"), "{error}");
        match TcpListener::bind("[::1]:0") {
            Err(e) => println!("SKIPPED: addresses of IPv6: {e}"),
            Ok(_) => {
                let (_listener, address) = listen(Some("[::1]"), None).unwrap();
                assert!(address.starts_with("[::1]:"), "{address}");
                connect(&address, TIMEOUT).unwrap();
            }
        }
    }

    #[test]
    fn interfaces_are_found_by_name_and_by_network() {
        for interface in ["lo", "127.0.0.0/8", "127.0.0.1/32"] {
            let (listener, address) = listen(None, Some(interface)).unwrap();
            assert_eq!(address, listener.local_addr().unwrap().to_string());
            assert!(address.starts_with("127.0.0.1:"), "{interface}: {address}");
            connect(&address, TIMEOUT).unwrap();
            let (listener, address) = listen(Some("node7:0"), Some(interface)).unwrap();
            assert!(
                address.starts_with("node7:") && listener.local_addr().unwrap().ip().is_loopback(),
                "{address}"
            );
        }
        for (wrong, expected) in [
            ("ib7", "has no interface \"ib7\""),
            ("203.0.113.0/24", "has no interface in the network"),
        ] {
            let error = listen(None, Some(wrong)).unwrap_err().to_string();
            assert!(error.contains(expected) && error.contains("lo (127.0.0.1)"), "{error}");
        }
    }
}
