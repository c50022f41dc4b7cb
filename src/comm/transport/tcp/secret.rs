//! The key that the processes of a run share, and the file that holds it.

use std::fs::OpenOptions;
use std::io::{Read as _, Write as _};
use std::os::unix::fs::{OpenOptionsExt as _, PermissionsExt as _};
use std::path::{Path, PathBuf};

use rustix::rand::{GetRandomFlags, getrandom};
use sha2::{Digest as _, Sha256};

use hpctrain_base::error::{Error, Result};

/// The mode bits that give the group or others access to a file.
const OTHERS_MODE: u32 = 0o077;

/// The key that the processes of a run share.
#[derive(Clone)]
pub struct Secret(Vec<u8>);

impl Secret {
    /// The number of bytes of a new secret.
    pub const LEN: usize = 32;

    /// Creates a secret from at least 16 bytes.
    ///
    /// # Errors
    /// Returns an error if there are fewer bytes.
    pub fn new(bytes: Vec<u8>) -> Result<Self> {
        if bytes.len() < 16 {
            return Err(Error::input(format!("the secret has only {} bytes", bytes.len()))
                .hint("use at least 16 random bytes"));
        }
        Ok(Self(bytes))
    }

    /// Returns the bytes of a new secret.
    ///
    /// # Errors
    /// Returns an error if the system has no random bytes.
    pub fn random() -> Result<Vec<u8>> {
        let mut bytes = vec![0; Self::LEN];
        match getrandom(&mut bytes[..], GetRandomFlags::empty()) {
            Ok(Self::LEN) => Ok(bytes),
            other => {
                Err(Error::internal(format!("cannot get random bytes from the system: {other:?}")))
            }
        }
    }

    /// Returns the path of the secret in a directory.
    pub fn path(dir: &Path) -> PathBuf {
        dir.join("secret")
    }

    /// Reads the secret of a directory.
    ///
    /// # Errors
    /// Returns an error if it cannot be read, users other than its owner have access to it, or it
    /// has fewer than 16 bytes.
    pub fn read(dir: &Path) -> Result<Self> {
        let path = Self::path(dir);
        let refused = |e| Error::io("read", &path, e);
        let mut file = std::fs::File::open(&path).map_err(refused)?;
        let mode = file.metadata().map_err(refused)?.permissions().mode() & 0o7777;
        if mode & OTHERS_MODE != 0 {
            let name = path.display();
            let message = format!(
                "{name} has mode {mode:o}: users other than its owner have access to the secret of the run"
            );
            return Err(Error::input(message).hint(format!(
                "chmod 600 {name}; if others may have read it, end all processes of the run and remove it: hpctrain \
                 ps coordinator writes a new one"
            )));
        }
        let mut bytes = Vec::new();
        file.read_to_end(&mut bytes).map_err(refused)?;
        Self::new(bytes)
    }

    /// Returns the pre-shared key of handshakes.
    pub fn key(&self) -> [u8; 32] {
        Sha256::digest(&self.0).into()
    }
}

/// Writes a new secret into `dir`, which only this user can read.
///
/// # Errors
/// Returns an error if the file cannot be written, or already exists.
pub fn write_secret(dir: &Path) -> Result<()> {
    let path = Secret::path(dir);
    let secret = Secret::random()?;
    let file = OpenOptions::new().write(true).create_new(true).mode(0o600).open(&path);
    file.and_then(|mut file| file.write_all(&secret)).map_err(|e| Error::io("write", &path, e))
}

#[cfg(test)]
mod tests {
    use std::fs::{Permissions, set_permissions};

    use super::*;

    #[test]
    fn secrets_that_others_may_use_are_refused() {
        let dir = tempfile::tempdir().unwrap();
        write_secret(dir.path()).unwrap();
        assert!(Secret::read(dir.path()).is_ok());
        for mode in [0o644, 0o640, 0o660, 0o601, 0o620] {
            set_permissions(Secret::path(dir.path()), Permissions::from_mode(mode)).unwrap();
            let error = Secret::read(dir.path()).err().unwrap().to_string();
            assert!(
                error.contains(&format!("secret has mode {mode:o}")) && error.contains("chmod 600"),
                "{error}"
            );
        }
        set_permissions(Secret::path(dir.path()), Permissions::from_mode(0o400)).unwrap();
        assert!(Secret::read(dir.path()).is_ok());
        assert!(Secret::new(vec![1; 15]).is_err());
    }
}
