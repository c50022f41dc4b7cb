//! Serialisation of paths in messages between processes, as bytes if they are not UTF-8, since JSON
//! strings are Unicode.

use std::ffi::OsString;
use std::os::unix::ffi::{OsStrExt as _, OsStringExt as _};
use std::path::{Path, PathBuf};

use serde::{Deserialize, Deserializer, Serialize, Serializer};

#[derive(Serialize, Deserialize)]
#[serde(untagged)]
enum Written {
    Text(String),
    Bytes(Vec<u8>),
}

pub fn serialize<S: Serializer>(path: &Path, to: S) -> Result<S::Ok, S::Error> {
    match path.to_str() {
        Some(text) => text.serialize(to),
        None => path.as_os_str().as_bytes().serialize(to),
    }
}

pub fn deserialize<'de, D: Deserializer<'de>>(from: D) -> Result<PathBuf, D::Error> {
    Ok(match Written::deserialize(from)? {
        Written::Text(text) => PathBuf::from(text),
        Written::Bytes(bytes) => OsString::from_vec(bytes).into(),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn any_path_comes_back() {
        #[derive(Serialize, Deserialize)]
        struct Holder(#[serde(with = "super")] PathBuf);

        for bytes in [&b"/a/\xc3\xa4.h5"[..], b"/a/\xff.h5"] {
            let path = PathBuf::from(OsString::from_vec(bytes.to_vec()));
            let text = serde_json::to_string(&Holder(path.clone())).unwrap();
            let Holder(again) = serde_json::from_str(&text).unwrap();
            assert_eq!(again, path);
        }
    }
}
