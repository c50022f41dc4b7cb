//! Escapes control characters in text from files for display: they could move the cursor, colour
//! the screen, or type into a terminal.

use std::borrow::Cow;
use std::fmt::Write as _;

/// Escapes control characters of a text as JSON does, such as `\u001b`. Line ends and tabs are
/// kept.
pub fn visible(text: &str) -> Cow<'_, str> {
    // A carriage return before the end of a line is harmless.
    escape(text, |c, next| matches!(c, '\n' | '\t') || c == '\r' && next == Some('\n'))
}

/// Escapes like [`visible`], also line ends and tabs: for names and table cells.
pub fn in_one_line(text: &str) -> Cow<'_, str> {
    escape(text, |_, _| false)
}

fn escape(text: &str, keep: impl Fn(char, Option<char>) -> bool) -> Cow<'_, str> {
    if !text.chars().any(is_control) {
        return Cow::Borrowed(text);
    }
    let mut out = String::with_capacity(text.len());
    let mut rest = text.chars().peekable();
    while let Some(c) = rest.next() {
        if is_control(c) && !keep(c, rest.peek().copied()) {
            // Writing to a string does not fail.
            let _ = write!(out, "\\u{:04x}", u32::from(c));
        } else {
            out.push(c);
        }
    }
    Cow::Owned(out)
}

/// Returns true for control characters, and for those that change the direction of text.
fn is_control(c: char) -> bool {
    c.is_control()
        || matches!(c, '\u{200e}' | '\u{200f}' | '\u{202a}'..='\u{202e}' | '\u{2066}'..='\u{2069}')
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn nothing_acts_any_more() {
        assert!(matches!(visible("naïve — 🦀 text"), Cow::Borrowed(_)));
        assert_eq!(visible("naïve — 🦀\n\ttext\r\n"), "naïve — 🦀\n\ttext\r\n");
        assert_eq!(
            visible("\x1b]0;title\x07\rover\u{9b}2J\u{202e}"),
            "\\u001b]0;title\\u0007\\u000dover\\u009b2J\\u202e"
        );
        assert_eq!(in_one_line("a\nb\tc"), "a\\u000ab\\u0009c");
        assert_eq!(serde_json::from_str::<String>(&visible("\"\u{9b}\"")).unwrap(), "\u{9b}");
    }
}
