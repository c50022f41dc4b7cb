//! Words of the field: expressions that readers do not search for (`words.toml`), and names of types
//! that say too little.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use regex::Regex;
use serde::Deserialize;

/// Names of types that more than two modules define publicly. Protocols of others are exempt.
const REPEATED: [&str; 0] = [];

/// Types of other protocols: TensorBoard's records.
const PROTOCOLS: &str = "config/telemetry/tensorboard/protocol.rs";

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Words {
    word: Vec<Word>,
}

/// An expression that the project avoids.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Word {
    /// The expression, as a regular expression.
    pattern: String,
    /// Expressions that contain it and are right.
    #[serde(default)]
    except: Option<String>,
    scope: Scope,
    /// The expression to write instead.
    instead: String,
    /// A text that has it, and one that does not.
    hit: String,
    miss: String,
    /// The number of occurrences at b36b127.
    before: usize,
}

#[derive(Debug, Clone, Copy, PartialEq, Deserialize)]
#[serde(rename_all = "lowercase")]
enum Scope {
    /// Code without comments and strings.
    Identifiers,
    /// Comments, strings and pages.
    Text,
}

impl Word {
    fn count(&self, text: &str) -> usize {
        let pattern = Regex::new(&self.pattern).unwrap();
        match &self.except {
            None => pattern.find_iter(text).count(),
            Some(except) => {
                let rest = Regex::new(except).unwrap().replace_all(text, "");
                pattern.find_iter(&rest).count()
            }
        }
    }
}

/// Files with one of these extensions below a folder, without those of the simulator and of this
/// program.
fn files(folder: &Path, extension: &str, found: &mut Vec<PathBuf>) {
    for entry in std::fs::read_dir(folder).unwrap() {
        let path = entry.unwrap().path();
        if path.is_dir() {
            let is_exempt = path.ends_with("tests/cudasim") || path.ends_with("tests/architecture");
            if !is_exempt {
                files(&path, extension, found);
            }
        } else if path.extension().is_some_and(|of_path| of_path == extension) {
            found.push(path);
        }
    }
}

/// The end of the comment, string or character that begins at `start`, if one does.
fn end_of_literal(text: &[u8], start: usize) -> Option<usize> {
    let rest = &text[start..];
    let find = |needle: &[u8], from: usize| {
        let tail = text.get(from..)?;
        tail.windows(needle.len()).position(|window| window == needle).map(|at| from + at)
    };
    if rest.starts_with(b"//") {
        return Some(find(b"\n", start).unwrap_or(text.len()));
    }
    if rest.starts_with(b"/*") {
        return find(b"*/", start).map(|at| at + 2);
    }
    let is_word = |at: usize| text[at].is_ascii_alphanumeric() || text[at] == b'_';
    if rest[0] == b'r' && (start == 0 || !is_word(start - 1)) {
        let hashes = rest[1..].iter().take_while(|byte| **byte == b'#').count();
        if rest.get(1 + hashes) == Some(&b'"') {
            let close = [b"\"", &b"#".repeat(hashes)[..]].concat();
            return find(&close, start + hashes + 2).map(|at| at + close.len());
        }
    }
    match rest[0] {
        b'"' => {
            let mut at = start + 1;
            while text[at] != b'"' {
                at += if text[at] == b'\\' { 2 } else { 1 };
            }
            Some(at + 1)
        }
        // A character, and not a lifetime.
        b'\'' if rest.get(1) == Some(&b'\\') => find(b"'", start + 3).map(|at| at + 1),
        b'\'' => {
            let width = std::str::from_utf8(&rest[1..rest.len().min(5)])
                .unwrap_or_else(|e| std::str::from_utf8(&rest[1..=e.valid_up_to()]).unwrap_or("x"))
                .chars()
                .next()
                .map_or(1, char::len_utf8);
            (rest.get(1 + width) == Some(&b'\'')).then_some(start + width + 2)
        }
        _ => None,
    }
}

/// The code of a file, and its comments and strings.
fn code_and_text(source: &str) -> (String, String) {
    let bytes = source.as_bytes();
    let (mut code, mut text) = (Vec::new(), Vec::new());
    let mut at = 0;
    while at < bytes.len() {
        if let Some(end) = end_of_literal(bytes, at) {
            code.push(b'\n');
            text.extend_from_slice(&bytes[at..end]);
            text.push(b'\n');
            at = end;
        } else {
            code.push(bytes[at]);
            at += 1;
        }
    }
    let of = |bytes: Vec<u8>| String::from_utf8(bytes).unwrap();
    (of(code), of(text))
}

/// Everything in each scope.
fn all() -> [(Scope, String); 2] {
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    let mut sources = Vec::new();
    for folder in ["src", "tests", "examples"] {
        files(&root.join(folder), "rs", &mut sources);
    }
    let mut identifiers = String::new();
    let mut texts = String::new();
    for path in sources {
        let (code, text) = code_and_text(&std::fs::read_to_string(path).unwrap());
        identifiers += &code;
        texts += &text;
    }
    let mut pages: Vec<PathBuf> =
        ["README.md", "CONTRIBUTING.md"].map(|name| root.join(name)).into();
    files(&root.join("docs"), "md", &mut pages);
    for (folder, extension) in [("examples", "toml"), ("examples", "sh"), ("slurm", "sbatch")] {
        files(&root.join(folder), extension, &mut pages);
    }
    for script in std::fs::read_dir(root.join("scripts")).unwrap() {
        pages.push(script.unwrap().path());
    }
    // Records of the past.
    pages.retain(|page| !page.ends_with("lab-notes.md"));
    for page in pages {
        texts += &std::fs::read_to_string(page).unwrap();
    }
    [(Scope::Identifiers, identifiers), (Scope::Text, texts)]
}

#[test]
fn words_of_the_field_are_used() {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/architecture/words.toml");
    let words: Words = toml::from_str(&std::fs::read_to_string(path).unwrap()).unwrap();
    assert!(words.word.len() >= 60, "{}", words.word.len());
    let all = all();
    let mut more = Vec::new();
    for word in &words.word {
        assert!(word.count(&word.hit) > 0, "{} does not hit {:?}", word.pattern, word.hit);
        assert_eq!(word.count(&word.miss), 0, "{} hits {:?}", word.pattern, word.miss);
        let (_, text) = all.iter().find(|(scope, _)| *scope == word.scope).unwrap();
        let count = word.count(text);
        println!("{count:5} now, {:5} at b36b127: {}", word.before, word.pattern);
        if count > 0 {
            more.push(format!("{} occurs {count} times: write {}", word.pattern, word.instead));
        }
    }
    assert!(more.is_empty(), "{}", more.join("\n"));
}

#[test]
fn types_have_names_of_their_own() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("src");
    let mut sources = Vec::new();
    files(&root, "rs", &mut sources);
    let defined = Regex::new(r"(?m)^\s*pub (?:struct|enum|trait|type|union) (\w+)").unwrap();
    let mut modules: BTreeMap<String, Vec<String>> = BTreeMap::new();
    for path in sources {
        let file = path.strip_prefix(&root).unwrap().to_str().unwrap().to_owned();
        // The operations of a device are functions and structures of one name in three crates.
        if file == PROTOCOLS {
            continue;
        }
        let (code, _) = code_and_text(&std::fs::read_to_string(&path).unwrap());
        for name in defined.captures_iter(&code) {
            modules.entry(name[1].to_owned()).or_default().push(file.clone());
        }
    }
    let repeated: Vec<_> = modules.iter().filter(|(_, files)| files.len() > 2).collect();
    let is_known = |name: &str| REPEATED.contains(&name);
    let new: Vec<_> = repeated.iter().filter(|(name, _)| !is_known(name)).collect();
    assert!(new.is_empty(), "say what each is of: {new:?}");
}
