//! The documents of an import of text: files, files of directories, or the standard input, either
//! whole or as JSON lines.

use std::fs::File;
use std::io::{self, BufRead as _, BufReader, Read};
use std::path::{Path, PathBuf};

use serde::de::{DeserializeSeed, Deserializer, Error as _, IgnoredAny, MapAccess, Visitor};
use serde_json::Value;
use sha2::{Digest, Sha256};

use super::{hex, missing};
use hpctrain_base::error::{Error, Result};
use hpctrain_base::safe_open;

/// The longest line of JSON in bytes: it is held in memory together with its text.
const LONGEST_LINE: usize = 32 << 20;

/// One input of an import.
#[derive(Debug, PartialEq, Eq)]
enum Input {
    /// A file that was named explicitly, which may be a pipe.
    Named(PathBuf),
    /// A file of a directory that was named.
    Listed(PathBuf),
    Standard,
}

/// The inputs of an import, in order.
pub(super) struct Documents {
    inputs: Vec<Input>,
    hash: Sha256,
}

impl Documents {
    /// Finds the files that `paths` name: `-` is the standard input. Directories stand for all
    /// files below them, ordered by name; names that begin with a dot are skipped.
    ///
    /// # Errors
    /// Returns an error if a path does not exist, or if a directory holds no file.
    pub fn find(paths: &[PathBuf]) -> Result<Self> {
        let mut inputs = Vec::new();
        for path in paths {
            if path == Path::new("-") {
                if inputs.contains(&Input::Standard) {
                    return Err(Error::input("- is given twice")
                        .hint("the standard input can be read once"));
                }
                inputs.push(Input::Standard);
            } else if path.is_dir() {
                let before = inputs.len();
                list(path, &mut inputs)?;
                if inputs.len() == before {
                    return Err(Error::input(format!("{} holds no file", path.display()))
                        .hint("give a directory with texts, or the texts themselves"));
                }
            } else {
                std::fs::metadata(path)
                    .map_err(|e| missing(path, &e, "give the path of a text file"))?;
                inputs.push(Input::Named(path.clone()));
            }
        }
        Ok(Self { inputs, hash: Sha256::new() })
    }

    /// Returns a name for all inputs: the name of the first without its directory, and the number
    /// of the others.
    pub fn source(&self) -> String {
        let first = match self.inputs.first() {
            Some(Input::Named(path) | Input::Listed(path)) => {
                path.file_name().unwrap_or_default().to_string_lossy().into_owned()
            }
            _ => STANDARD.into(),
        };
        match self.inputs.len() {
            0 | 1 => first,
            all => format!("{first} and {} more", all - 1),
        }
    }

    /// Calls `each` with the name and the text of every document: of every file, or of every line
    /// of JSON, whose text is in the field `field`. Lines of white space are skipped.
    ///
    /// # Errors
    /// Returns an error if a file cannot be read, a line is malformed, or `each` fails.
    pub fn each(
        &mut self,
        field: Option<&str>,
        mut each: impl FnMut(&str, &mut dyn Read) -> Result<()>,
    ) -> Result<()> {
        let Self { inputs, hash } = self;
        for input in inputs {
            let (name, from): (String, Box<dyn Read>) = match input {
                Input::Standard => (STANDARD.into(), Box::new(io::stdin().lock())),
                Input::Named(path) => {
                    let file = File::open(&*path)
                        .map_err(|e| missing(path, &e, "give the path of a text file"))?;
                    (path.display().to_string(), Box::new(file))
                }
                Input::Listed(path) => {
                    let file = safe_open::open(path).map_err(|e| Error::io("read", path, e))?;
                    (path.display().to_string(), Box::new(file))
                }
            };
            let mut from = Hashed { from, hash: &mut *hash };
            match field {
                None => each(&name, &mut from)?,
                Some(field) => lines(&name, from, field, &mut each)?,
            }
        }
        Ok(())
    }

    /// Returns the SHA-256 of all bytes, in hexadecimal.
    pub fn sha256(self) -> String {
        hex(&self.hash.finalize())
    }
}

/// The name of the standard input in messages.
const STANDARD: &str = "standard input";

/// Adds the files of a directory and of those below it.
fn list(folder: &Path, inputs: &mut Vec<Input>) -> Result<()> {
    let failed = |e| Error::io("list", folder, e);
    let entries = std::fs::read_dir(folder)
        .map_err(failed)?
        .collect::<Result<Vec<_>, _>>()
        .map_err(failed)?;
    let mut paths: Vec<PathBuf> = entries.iter().map(std::fs::DirEntry::path).collect();
    paths.retain(|path| !path.file_name().unwrap_or_default().as_encoded_bytes().starts_with(b"."));
    paths.sort();
    for path in paths {
        if !path.is_dir() {
            inputs.push(Input::Listed(path));
        } else if path.is_symlink() {
            // It may lead back to a directory above.
            return Err(Error::input(format!("{} is a link to a directory", path.display()))
                .hint("give that directory itself, or remove the link"));
        } else {
            list(&path, inputs)?;
        }
    }
    Ok(())
}

/// A reader that hashes the bytes that it reads.
struct Hashed<'a> {
    from: Box<dyn Read>,
    hash: &'a mut Sha256,
}

impl Read for Hashed<'_> {
    fn read(&mut self, to: &mut [u8]) -> io::Result<usize> {
        let read = self.from.read(to)?;
        self.hash.update(&to[..read]);
        Ok(read)
    }
}

/// Calls `each` with the text of every line of JSON.
fn lines(
    name: &str,
    from: Hashed<'_>,
    field: &str,
    each: &mut dyn FnMut(&str, &mut dyn Read) -> Result<()>,
) -> Result<()> {
    let mut from = BufReader::with_capacity(1 << 16, from);
    let mut line = Vec::new();
    for number in 1.. {
        line.clear();
        let read = (&mut from).take(LONGEST_LINE as u64 + 1).read_until(b'\n', &mut line);
        if read.map_err(|e| Error::io("read", Path::new(name), e))? == 0 {
            break;
        }
        let place = format!("{name}: line {number}");
        if line.len() > LONGEST_LINE {
            return Err(Error::input(format!("{place} is longer than {} MiB", LONGEST_LINE >> 20))
                .hint("put one document on each line, or divide it; without --field files are read as plain text"));
        }
        let line = if number == 1 {
            line.strip_prefix(BYTE_ORDER_MARK).unwrap_or(&line)
        } else {
            &line[..]
        };
        if line.trim_ascii().is_empty() {
            continue;
        }
        let text = text_of(line, field).map_err(|e| e.at(&place))?;
        each(&place, &mut text.as_bytes())?;
    }
    Ok(())
}

/// The bytes that some programs write before UTF-8 text.
const BYTE_ORDER_MARK: &[u8] = b"\xef\xbb\xbf";

/// Returns the string in a field of a line of JSON.
///
/// # Errors
/// Returns an error that names the fault and its column.
fn text_of(line: &[u8], field: &str) -> Result<String> {
    let wrong = |what: String| {
        Error::input(what)
            .hint("with --field every line is a JSON object with the text in that field")
    };
    let mut json = serde_json::Deserializer::from_slice(line);
    let found = Wanted(field).deserialize(&mut json).and_then(|found| json.end().map(|()| found));
    match found {
        Ok(Value::String(text)) => Ok(text),
        Ok(other) => {
            let kind = match other {
                Value::Null => "null",
                Value::Bool(_) => "a truth value",
                Value::Number(_) => "a number",
                Value::Array(_) => "an array",
                Value::Object(_) | Value::String(_) => "an object",
            };
            Err(wrong(format!("field {field:?} is {kind}, not a string")))
        }
        Err(e) => {
            let whole = e.to_string();
            let column = e.column();
            // A line is the whole text: its number in the message is always 1.
            let what = whole
                .strip_suffix(&format!(" at line {} column {column}", e.line()))
                .unwrap_or(&whole);
            match what {
                "lone leading surrogate in hex escape" | "unexpected end of hex escape" => {
                    Err(Error::input(format!(
                        "column {column}: a \\u escape is half of a surrogate pair"
                    ))
                    .hint("write the whole pair, or \\ufffd instead of the half"))
                }
                _ => Err(wrong(format!("column {column}: {what}"))),
            }
        }
    }
}

/// Deserialises one field of an object; the others are dropped.
struct Wanted<'a>(&'a str);

impl<'de> DeserializeSeed<'de> for Wanted<'_> {
    type Value = Value;

    fn deserialize<D: Deserializer<'de>>(self, from: D) -> Result<Value, D::Error> {
        from.deserialize_map(self)
    }
}

impl<'de> Visitor<'de> for Wanted<'_> {
    type Value = Value;

    fn expecting(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "an object with the field {:?}", self.0)
    }

    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Value, A::Error> {
        let mut found = None;
        while let Some(key) = map.next_key::<String>()? {
            if key == self.0 {
                found = Some(map.next_value()?);
            } else {
                map.next_value::<IgnoredAny>()?;
            }
        }
        found.ok_or_else(|| A::Error::custom(format!("there is no field {:?}", self.0)))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn all(paths: &[PathBuf], field: Option<&str>) -> Result<Vec<(String, String)>> {
        let mut found = Vec::new();
        Documents::find(paths)?.each(field, |name, from| {
            let mut text = String::new();
            from.read_to_string(&mut text).map_err(|e| Error::internal(e.to_string()))?;
            found.push((name.to_owned(), text));
            Ok(())
        })?;
        Ok(found)
    }

    #[test]
    fn directories_are_gone_through_by_name() {
        let root = tempfile::tempdir().unwrap();
        let at = |name: &str| root.path().join(name);
        std::fs::create_dir_all(at("texts/b/deep")).unwrap();
        for name in ["texts/c", "texts/a", "texts/b/deep/x", "texts/b/y", "texts/.hidden", "alone"]
        {
            std::fs::write(at(name), name).unwrap();
        }
        let found = all(&[at("texts"), at("alone")], None).unwrap();
        let texts: Vec<&str> = found.iter().map(|(_, text)| &text[..]).collect();
        assert_eq!(texts, ["texts/a", "texts/b/deep/x", "texts/b/y", "texts/c", "alone"]);
        assert_eq!(Documents::find(&[at("texts")]).unwrap().source(), "a and 3 more");

        let refused = |paths: &[PathBuf]| all(paths, None).unwrap_err().to_string();
        std::fs::create_dir(at("empty")).unwrap();
        assert!(refused(&[at("empty")]).contains("empty holds no file\nhint: "));
        assert!(refused(&[at("nowhere")]).contains("nowhere does not exist\nhint: "));
        assert!(refused(&["-".into(), "-".into()]).contains("- is given twice"));
        std::os::unix::fs::symlink("..", at("texts/up")).unwrap();
        assert!(refused(&[at("texts")]).contains("texts/up is a link to a directory\nhint: "));
        std::fs::remove_file(at("texts/up")).unwrap();
        rustix::fs::mknodat(
            rustix::fs::CWD,
            at("texts/pipe"),
            rustix::fs::FileType::Fifo,
            0o600.into(),
            0,
        )
        .unwrap();
        assert!(refused(&[at("texts")]).contains("texts/pipe: it is a pipe"));
    }

    #[test]
    fn lines_of_json_are_documents() {
        let root = tempfile::tempdir().unwrap();
        let path = root.path().join("x.jsonl");
        let read = |content: &str| {
            std::fs::write(&path, content).unwrap();
            all(std::slice::from_ref(&path), Some("text"))
        };
        let found = read(
            "{\"id\": [1, {\"text\": 2}], \"text\": \"a\\nb\\u00e9\"}\r\n\n  \n{\"text\":\"\"}",
        )
        .unwrap();
        let texts: Vec<(&str, &str)> =
            found.iter().map(|(name, text)| (&name[name.len() - 6..], &text[..])).collect();
        assert_eq!(texts, [("line 1", "a\nbé"), ("line 4", "")]);
        // With a byte order mark.
        let found = read("\u{feff}{\"text\": \"a\"}\n{\"text\": \"b\"}").unwrap();
        assert_eq!(found.len(), 2);
        for half in ["\\ud83d", "\\ud83d x", "\\ude00", "\\ud83d\\u0041"] {
            let error = read(&format!("{{\"text\": \"a\"}}\n{{\"text\": \"{half}\"}}"))
                .unwrap_err()
                .to_string();
            assert!(
                error.contains("x.jsonl: line 2: column ")
                    && error.contains("half of a surrogate pair\nhint: "),
                "{error}"
            );
            assert_eq!(error.matches("line").count(), 1, "{error}");
        }
        for (content, wanted) in [
            (
                "{\"text\": \"a\"}\n{\"txt\": \"b\"}",
                "x.jsonl: line 2: column 12: there is no field \"text\"",
            ),
            ("{\"text\": 5}", "line 1: field \"text\" is a number, not a string"),
            ("{\"text\": null}", "line 1: field \"text\" is null, not a string"),
            (
                "[\"text\"]",
                "line 1: column 0: invalid type: sequence, expected an object with the field \"text\"",
            ),
            ("{\"text\": \"a\"} x", "line 1: column 15: trailing characters"),
            ("{\"text\": \"a", "line 1: column 11: EOF while parsing a string"),
        ] {
            let error = read(content).unwrap_err().to_string();
            assert!(error.contains(wanted) && error.contains("\nhint: with --field"), "{error}");
        }
    }
}
