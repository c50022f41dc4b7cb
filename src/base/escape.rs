//! Texts of files as people see them: control characters would move the cursor, colour the screen,
//! or type into a terminal.

use std::borrow::Cow;
use std::fmt::Write as _;

/// A text with its control characters written out, as JSON writes them: `\u001b`. Lines and tabs
/// stay.
pub fn visible(text: &str) -> Cow<'_, str> {
    // Before the end of a line, a carriage return does nothing more.
    written_out(text, |c, next| matches!(c, '\n' | '\t') || c == '\r' && next == Some('\n'))
}

/// As [`visible`], in one line: for names and the cells of tables.
pub fn in_one_line(text: &str) -> Cow<'_, str> {
    written_out(text, |_, _| false)
}

fn written_out(text: &str, stays: impl Fn(char, Option<char>) -> bool) -> Cow<'_, str> {
    if !text.chars().any(acts) {
        return Cow::Borrowed(text);
    }
    let mut out = String::with_capacity(text.len());
    let mut rest = text.chars().peekable();
    while let Some(c) = rest.next() {
        if acts(c) && !stays(c, rest.peek().copied()) {
            // Writing to a string does not fail.
            let _ = write!(out, "\\u{:04x}", u32::from(c));
        } else {
            out.push(c);
        }
    }
    Cow::Owned(out)
}

/// Whether a character does something other than to be seen: controls, and those that turn the
/// direction of a text.
fn acts(c: char) -> bool {
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
