//! The place where the processes of a run find their coordinator: the directory `servers` in that of the run.

use std::fs;
use std::net::{TcpListener, TcpStream, ToSocketAddrs as _};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use super::journal::Journal;
use crate::comm::{Secret, write_secret};
use crate::error::{Error, Result};
use crate::own_files;
use crate::private;
use crate::run_dir::REQUEUE;
use crate::run_dir::markers::{Markers, Status};

/// Name of the file with the coordinator's address.
const COORDINATOR: &str = "coordinator";

/// Interval at which a file is looked for.
const LOOK: Duration = Duration::from_millis(50);

/// The directory.
#[derive(Debug, Clone)]
pub struct Site {
    run: PathBuf,
    dir: PathBuf,
}

impl Site {
    /// That of the run in `run`.
    pub fn of(run: &Path) -> Self {
        Self { run: run.into(), dir: run.join("servers") }
    }

    /// The exit code of the run, if it has ended: its coordinator may be gone before all have heard of that.
    pub fn ended(&self) -> Option<i32> {
        Markers::new(&self.run).ended().map(|end| match end.status {
            Status::Finished => 0,
            Status::Preempted => REQUEUE,
            Status::Failed => 1,
        })
    }

    /// Makes it, with a secret of its own, unless it is there; returns the secret.
    ///
    /// # Errors
    /// The file system refused.
    pub fn open(&self) -> Result<Secret> {
        fs::create_dir_all(&self.dir).map_err(|e| Error::io("create", &self.dir, e))?;
        private::directory(&self.dir)?;
        if !Secret::path(&self.dir).exists() {
            write_secret(&self.dir)?;
        }
        self.secret()
    }

    /// The coordinator's journal.
    pub fn journal(&self) -> Journal {
        Journal::at(&self.dir)
    }

    /// The run's secret.
    ///
    /// # Errors
    /// It cannot be read.
    pub fn secret(&self) -> Result<Secret> {
        let hint = "it is the run's secret, which only the user of the coordinator can read";
        Secret::read(&self.dir).map_err(|e| e.hint(hint))
    }

    /// Tells the coordinator's address.
    ///
    /// # Errors
    /// The file system refused.
    pub fn tell(&self, address: &str) -> Result<()> {
        let (path, new) = (self.dir.join(COORDINATOR), self.dir.join("coordinator.new"));
        own_files::write(&new, address).and_then(|()| fs::rename(&new, &path)).map_err(|e| Error::io("write", &path, e))
    }

    /// The coordinator's address, once it is told.
    ///
    /// # Errors
    /// It has not been for so long.
    pub fn coordinator(&self, patience: Duration) -> Result<String> {
        let (path, since) = (self.dir.join(COORDINATOR), Instant::now());
        loop {
            match fs::read_to_string(&path) {
                Ok(address) => return Ok(address),
                Err(_) if since.elapsed() < patience => std::thread::sleep(LOOK),
                Err(e) => {
                    return Err(Error::io("read", &path, e)
                        .hint("start hpctrain coordinate for the run, and give its directory"));
                }
            }
        }
    }
}

/// Listens; returns the address for others. `wish` is `servers.address`: a host, a host with a port, or a port as `:2222`. At an IP
/// address alone, or with a name at all addresses.
///
/// # Errors
/// The address is in use, or of another host.
pub fn listen(wish: Option<&str>) -> Result<(TcpListener, String)> {
    let (host, port) = match wish {
        None => (None, 0),
        Some(wish) => parse(wish)?,
    };
    // A name is for others: in a container it may stand for an address of another host, which passes on.
    let ip = host.as_deref().filter(|host| host.parse::<std::net::IpAddr>().is_ok());
    let local = (ip.unwrap_or("0.0.0.0"), port);
    let refused = |e: std::io::Error| {
        let told = format!("{}:{port}", local.0);
        Error::input(format!("cannot listen on {told}: {e}"))
            .hint("set servers.address to an address of this host that is free, or leave it out")
    };
    let listener = TcpListener::bind(local).map_err(refused)?;
    let port = listener.local_addr().map_err(refused)?.port();
    let host = host.unwrap_or_else(host_name);
    Ok((listener, format!("{host}:{port}")))
}

/// Host and port of `servers.address`.
fn parse(wish: &str) -> Result<(Option<String>, u16)> {
    let (host, port) = wish.rsplit_once(':').unwrap_or((wish, "0"));
    match port.parse() {
        Ok(port) => Ok((Some(host).filter(|host| !host.is_empty()).map(Into::into), port)),
        Err(_) => Err(Error::input(format!("servers.address = {wish:?} is no host with a port"))
            .hint("such as \"node7\", \"10.0.0.7:2222\" or \":2222\"")),
    }
}

/// Connects to an address that [`listen`] returned, on this host or another.
///
/// # Errors
/// The host is not known, or nobody listens there.
pub fn connect(address: &str, patience: Duration) -> Result<TcpStream> {
    let (host, port) = address.rsplit_once(':').ok_or_else(|| Error::comm(format!("{address:?} is no address")))?;
    // A host need not know its own name.
    let host = if host == host_name() { "127.0.0.1" } else { host };
    let found = format!("{host}:{port}").to_socket_addrs();
    let found = found.map_err(|e| {
        Error::comm(format!("{host} does not resolve: {e}")).hint("set servers.address to one that all hosts know")
    })?;
    let mut last = Error::comm(format!("{host} has no address"));
    for one in found {
        match TcpStream::connect_timeout(&one, patience) {
            Ok(stream) => {
                stream.set_nodelay(true).map_err(|e| Error::comm(e.to_string()))?;
                return Ok(stream);
            }
            Err(e) => last = Error::comm(format!("{address}: {e}")),
        }
    }
    Err(last)
}

/// The name of this host.
pub fn host_name() -> String {
    rustix::system::uname().nodename().to_string_lossy().into_owned()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn addresses_are_found() {
        let folder = tempfile::tempdir().unwrap();
        let site = Site::of(folder.path());
        assert!(site.coordinator(Duration::ZERO).unwrap_err().to_string().contains("hpctrain coordinate"));
        site.open().unwrap();
        site.open().unwrap();
        let (listener, address) = listen(None).unwrap();
        site.tell(&address).unwrap();
        let found = site.coordinator(Duration::ZERO).unwrap();
        assert_eq!(found, address);
        connect(&found, Duration::from_secs(5)).unwrap();
        let port = listener.local_addr().unwrap().port();
        let error = listen(Some(&format!("127.0.0.1:{port}"))).unwrap_err().to_string();
        assert!(error.contains(&format!("cannot listen on 127.0.0.1:{port}: Address already in use")), "{error}");
        let error = connect("no-such-host.invalid:1", Duration::from_secs(5)).unwrap_err().to_string();
        assert!(error.contains("no-such-host.invalid does not resolve"), "{error}");
        assert_eq!(parse("node7").unwrap(), (Some("node7".into()), 0));
        assert_eq!(parse(":2222").unwrap(), (None, 2222));
        assert!(parse("a:b").unwrap_err().to_string().contains("is no host with a port"));
    }
}
