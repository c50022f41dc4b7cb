//! Mutations of files and messages.

use serde_json::{Map, Value, json};

/// The structure that mutations respect, besides bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Form {
    /// No structure.
    Bytes,
    /// JSON.
    Json,
    /// JSON lines: one value per line.
    JsonLines,
    /// TOML.
    Toml,
    /// A header in JSON, preceded by its length in eight bytes, little-endian, then bytes.
    JsonHeader,
    /// Messages: the lengths of a head and a body in four and eight bytes, little-endian, then the
    /// head in JSON and the body.
    Message,
}

/// A generator of pseudo-random numbers (SplitMix64), seeded by a name and some numbers.
pub struct Rng(u64);

impl Rng {
    pub fn new(numbers: &[u64], name: &str) -> Self {
        let mut rng = Self(0x9e37_79b9_7f4a_7c15);
        for number in name.bytes().map(u64::from).chain(numbers.iter().copied()) {
            rng.0 ^= number;
            rng.next();
        }
        rng
    }

    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    /// Returns a number below `end`; 0 if `end` is 0.
    pub fn below(&mut self, end: usize) -> usize {
        if end == 0 { 0 } else { (self.next() % end as u64) as usize }
    }

    /// Returns true with this probability.
    fn is(&mut self, chance: f64) -> bool {
        (self.next() >> 11) as f64 / ((1u64 << 53) as f64) < chance
    }

    fn pick<'a, T>(&mut self, of: &'a [T]) -> &'a T {
        &of[self.below(of.len())]
    }
}

/// Returns one of the seeds with some mutations.
pub fn mutated(rng: &mut Rng, form: Form, seeds: &[Vec<u8>]) -> Vec<u8> {
    let mut input = rng.pick(seeds).clone();
    for _ in 0..1 + rng.below(3) {
        input = match form {
            Form::Bytes => bytes(rng, input, seeds),
            // Text that is no longer JSON, or some of the others, mutated byte by byte.
            _ if rng.is(0.25) => bytes(rng, input, seeds),
            Form::Json => json_of(rng, &input),
            Form::JsonLines => lines(rng, &input),
            Form::Toml => toml_of(rng, &input),
            Form::JsonHeader => header(rng, &input),
            Form::Message => message(rng, &input),
        };
    }
    input
}

/// Numbers at which something may overflow.
const NUMBERS: [u64; 12] = [
    0,
    1,
    0x7f,
    0xff,
    0x7fff,
    0xffff,
    0x7fff_ffff,
    0xffff_ffff,
    1 << 40,
    i64::MAX as u64,
    u64::MAX - 1,
    u64::MAX,
];

fn bytes(rng: &mut Rng, mut input: Vec<u8>, seeds: &[Vec<u8>]) -> Vec<u8> {
    let len = input.len();
    let from = rng.below(len + 1);
    let most = 1 + rng.below(256);
    let to = from + rng.below((len - from).min(most) + 1);
    match rng.below(10) {
        // One bit or byte.
        0 | 1 if len > 0 => input[from.min(len - 1)] ^= 1 << rng.below(8),
        2 if len > 0 => {
            input[from.min(len - 1)] = *rng.pick(&[0, 1, 0x7f, 0x80, 0xff, b'\n', b'"', b'[', b'9'])
        }
        // A length field, in either byte order.
        3 | 4 => {
            let number = *rng.pick(&NUMBERS);
            let width = *rng.pick(&[1, 2, 4, 8]);
            let number = if rng.is(0.5) {
                number.to_le_bytes()
            } else {
                (number << (64 - 8 * width)).to_be_bytes()
            };
            // Mostly near the start, where fields are.
            let at = if rng.is(0.5) { rng.below(len.min(128)) } else { from };
            input.iter_mut().skip(at).zip(&number[..width]).for_each(|(byte, new)| *byte = *new);
        }
        5 => input.truncate(from),
        6 => drop(input.drain(from..to)),
        // A repeated region, here or instead of another.
        7 => {
            let region = input[from..to].to_vec();
            let at = rng.below(len + 1);
            input.splice(at..at, region);
        }
        // The end of another seed.
        8 => {
            let other = rng.pick(seeds);
            let at = rng.below(other.len() + 1);
            input.truncate(from);
            input.extend_from_slice(&other[at..]);
        }
        // Other digits.
        _ => {
            if let Some(at) = (from..len).find(|at| input[*at].is_ascii_digit()) {
                let end = (at..len).find(|at| !input[*at].is_ascii_digit()).unwrap_or(len);
                let new = number_text(rng);
                input.splice(at..end, new.into_bytes());
            }
        }
    }
    // Inputs do not grow without limit.
    input.truncate(1 << 20);
    input
}

fn number_text(rng: &mut Rng) -> String {
    match rng.below(6) {
        0 => "-1".into(),
        1 => "1e308".into(),
        2 => "-1e999".into(),
        3 => "99999999999999999999999999".into(),
        4 => "0.1e-400".into(),
        _ => rng.pick(&NUMBERS).to_string(),
    }
}

/// Returns a value that replaces another one.
fn other(rng: &mut Rng, value: &Value) -> Value {
    match (rng.below(14), value) {
        (0, _) => Value::Null,
        (1, _) => json!(rng.is(0.5)),
        (2 | 3, _) => json!(*rng.pick(&NUMBERS)),
        (4, _) => json!(*rng.pick(&[-1i64, i64::MIN, -(1 << 40)])),
        (5, _) => json!(*rng.pick(&[0.5, -0.0, 1e308, 1e-320, -1e18, 4e9, 1.8e19])),
        (6, _) => {
            json!(*rng.pick(&[
                "",
                "\u{1b}[31m",
                "../../../etc/passwd",
                "/dev/zero",
                "nan",
                "é\u{0}",
                "1e999",
                "step-7"
            ]))
        }
        (7, _) => json!("x".repeat(rng.below(20_000))),
        (8, _) => json!([]),
        (9, _) => json!({}),
        (10, _) => (0..1 + rng.below(100)).fold(json!(0), |inner, _| json!([inner])),
        (11, Value::Number(number)) => {
            number.as_u64().map_or(json!(1), |number| json!(number.wrapping_add(1)))
        }
        (12, Value::Number(number)) => {
            number.as_u64().map_or(json!(0), |number| json!(number.wrapping_sub(1)))
        }
        (11, Value::String(text)) => json!(format!("{text}{text}")),
        (_, Value::Array(all)) => {
            let mut all = all.clone();
            let at = rng.below(all.len());
            match (all.is_empty(), rng.below(3)) {
                (true, _) => all.push(json!(0)),
                (_, 0) => drop(all.remove(at)),
                (_, 1) => all.push(all[at].clone()),
                _ => all.swap(0, at),
            }
            Value::Array(all)
        }
        (_, Value::Object(all)) => {
            let keys: Vec<&String> = all.keys().collect();
            let mut new: Map<String, Value> = all.clone();
            if !keys.is_empty() {
                let [one, two] = [rng.pick(&keys).as_str(), rng.pick(&keys).as_str()];
                match rng.below(3) {
                    0 => drop(new.remove(one)),
                    1 => drop(new.insert(one.into(), all[two].clone())),
                    _ => drop(new.insert(format!("{one}x"), all[two].clone())),
                }
            }
            Value::Object(new)
        }
        _ => json!(number_text(rng)),
    }
}

/// Returns the number of values in a tree.
fn count(value: &Value) -> usize {
    1 + match value {
        Value::Array(all) => all.iter().map(count).sum(),
        Value::Object(all) => all.values().map(count).sum(),
        _ => 0,
    }
}

/// Returns a value by its number in a tree, counted from the root.
fn nth<'a>(value: &'a mut Value, number: &mut usize) -> Option<&'a mut Value> {
    if *number == 0 {
        return Some(value);
    }
    *number -= 1;
    match value {
        Value::Array(all) => all.iter_mut().find_map(|one| nth(one, number)),
        Value::Object(all) => all.values_mut().find_map(|one| nth(one, number)),
        _ => None,
    }
}

/// Mutates a value anywhere in a tree.
fn tree(rng: &mut Rng, mut value: Value) -> Value {
    let mut number = rng.below(count(&value));
    if let Some(chosen) = nth(&mut value, &mut number) {
        *chosen = other(rng, chosen);
    }
    value
}

fn json_of(rng: &mut Rng, input: &[u8]) -> Vec<u8> {
    if rng.is(0.02) {
        let depth = 1 + rng.below(200_000);
        return if rng.is(0.5) { vec![b'['; depth] } else { b"{\"a\":".repeat(depth) };
    }
    match serde_json::from_slice(input) {
        Ok(value) => serde_json::to_vec(&tree(rng, value)).unwrap(),
        Err(_) => bytes(rng, input.to_vec(), &[input.to_vec()]),
    }
}

fn lines(rng: &mut Rng, input: &[u8]) -> Vec<u8> {
    let mut all: Vec<Vec<u8>> = input.split(|byte| *byte == b'\n').map(<[u8]>::to_vec).collect();
    let at = rng.below(all.len());
    match rng.below(8) {
        0 => drop(all.remove(at)),
        1 => all.push(all[at].clone()),
        2 => all.swap(0, at),
        3 => {
            let end = rng.below(all[at].len() + 1);
            all[at].truncate(end);
        }
        _ => all[at] = json_of(rng, &all[at]),
    }
    all.join(&b'\n')
}

fn toml_of(rng: &mut Rng, input: &[u8]) -> Vec<u8> {
    if rng.is(0.02) {
        let depth = 1 + rng.below(100_000);
        let begin = rng.pick(&["x = ", "[model]\nlayers = ", "x"]).as_bytes();
        let repeated = rng.pick(&["[", "{a = ", ".a"]);
        return [begin, repeated.repeat(depth).as_bytes()].concat();
    }
    let table =
        std::str::from_utf8(input).ok().and_then(|text| toml::from_str::<toml::Table>(text).ok());
    let value = table.and_then(|table| serde_json::to_value(table).ok());
    let written = value.and_then(|value| {
        let value = tree(rng, value);
        toml::to_string(&without_null(value)).ok()
    });
    written.map_or_else(|| bytes(rng, input.to_vec(), &[input.to_vec()]), String::into_bytes)
}

/// Removes nulls, which TOML does not have.
fn without_null(value: Value) -> Value {
    match value {
        Value::Null => json!("null"),
        Value::Array(all) => all.into_iter().map(without_null).collect(),
        Value::Object(all) => {
            all.into_iter().map(|(key, value)| (key, without_null(value))).collect()
        }
        other => other,
    }
}

fn header(rng: &mut Rng, input: &[u8]) -> Vec<u8> {
    let length = input.first_chunk::<8>().map(|length| u64::from_le_bytes(*length) as usize);
    let Some((header, rest)) = length.and_then(|length| input.get(8..)?.split_at_checked(length))
    else {
        return bytes(rng, input.to_vec(), &[input.to_vec()]);
    };
    let header = json_of(rng, header);
    [&(header.len() as u64).to_le_bytes()[..], &header, rest].concat()
}

fn message(rng: &mut Rng, input: &[u8]) -> Vec<u8> {
    let lens = input.first_chunk::<12>();
    let len = lens.map(|lens| u32::from_le_bytes([lens[0], lens[1], lens[2], lens[3]]) as usize);
    let Some((head, body)) = len.and_then(|len| input.get(12..)?.split_at_checked(len)) else {
        return bytes(rng, input.to_vec(), &[input.to_vec()]);
    };
    let head = json_of(rng, head);
    let body =
        if rng.is(0.3) { bytes(rng, body.to_vec(), &[body.to_vec()]) } else { body.to_vec() };
    framed(&head, &body)
}

/// Returns a message with this head and body.
pub fn framed(head: &[u8], body: &[u8]) -> Vec<u8> {
    [&(head.len() as u32).to_le_bytes()[..], &(body.len() as u64).to_le_bytes(), head, body]
        .concat()
}
