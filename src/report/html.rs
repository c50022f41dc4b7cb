//! HTML elements of the page. All texts of a run pass through [`escaped`].

use hpctrain_base::escape::visible;
use hpctrain_config::telemetry::{grouped, utc};

/// Escapes a text for use as content or in a quoted attribute.
pub fn escaped(text: &str) -> String {
    let text = visible(text);
    let mut out = String::with_capacity(text.len());
    for c in text.chars() {
        match c {
            '&' => out.push_str("&amp;"),
            '<' => out.push_str("&lt;"),
            '>' => out.push_str("&gt;"),
            '"' => out.push_str("&quot;"),
            '\'' => out.push_str("&#39;"),
            c => out.push(c),
        }
    }
    out
}

/// Escapes JSON for use as the content of a script element.
pub fn json_in_script(json: &str) -> String {
    json.replace('<', "\\u003c").replace('>', "\\u003e").replace('&', "\\u0026")
}

/// A cell of a table.
pub struct Cell {
    class: &'static str,
    /// HTML.
    content: String,
}

/// Creates a cell with a text.
pub fn text(text: impl AsRef<str>) -> Cell {
    Cell { class: "", content: escaped(text.as_ref()) }
}

/// Creates a cell with a long text.
pub fn wide(text: impl AsRef<str>) -> Cell {
    Cell { class: "wide", content: escaped(text.as_ref()) }
}

/// Creates a cell with a number.
pub fn number(text: impl AsRef<str>) -> Cell {
    Cell { class: "number", content: escaped(text.as_ref()) }
}

impl Cell {
    /// Inserts HTML before the text of the cell.
    pub fn after(self, html: &str) -> Self {
        Self { content: format!("{html}{}", self.content), ..self }
    }

    fn html(&self, element: &str) -> String {
        match self.class {
            "" => format!("<{element}>{}</{element}>", self.content),
            class => format!("<{element} class=\"{class}\">{}</{element}>", self.content),
        }
    }
}

/// Returns a table that scrolls horizontally if it is too wide.
pub fn table(head: Vec<Cell>, rows: Vec<Vec<Cell>>) -> String {
    let row = |cells: &[Cell], element: &str| {
        cells.iter().map(|cell| cell.html(element)).collect::<String>()
    };
    let body: String =
        rows.iter().map(|cells| format!("<tr>{}</tr>\n", row(cells, "td"))).collect();
    format!(
        "<div class=\"scroll\"><table><thead><tr>{}</tr></thead><tbody>\n{body}</tbody></table></div>\n",
        row(&head, "th")
    )
}

/// Returns a section with a heading; empty if it has no content.
pub fn section(id: &str, title: &str, content: &str) -> String {
    match content {
        "" => String::new(),
        content => {
            format!("<section id=\"{id}\"><h2>{}</h2>\n{content}</section>\n", escaped(title))
        }
    }
}

/// Returns a paragraph.
pub fn paragraph(text: &str) -> String {
    format!("<p>{}</p>\n", escaped(text))
}

/// Returns a paragraph in a muted style, for side notes.
pub fn muted(text: &str) -> String {
    format!("<p class=\"quiet\">{}</p>\n", escaped(text))
}

/// Returns a heading within a section.
pub fn heading(text: &str) -> String {
    format!("<h3>{}</h3>\n", escaped(text))
}

/// Formats a number with the digits that matter for comparison; `None` as a dash.
pub fn digits(value: Option<f64>) -> String {
    match value {
        None => "–".into(),
        Some(value) if !value.is_finite() => "not finite".into(),
        Some(0.0) => "0".into(),
        Some(value) if value.abs() >= 1e6 || value.abs() < 1e-3 => format!("{value:.3e}"),
        Some(value) if value.abs() >= 1000.0 => {
            let sign = if value < 0.0 { "-" } else { "" };
            format!("{sign}{}", grouped(value.abs().round() as u64))
        }
        Some(value) => format!("{value:.4}"),
    }
}

/// Formats a duration in seconds for display.
pub fn seconds(seconds: f64) -> String {
    match std::time::Duration::try_from_secs_f64(seconds) {
        Ok(time) if seconds >= 10.0 => {
            humantime::format_duration(std::time::Duration::from_secs(time.as_secs())).to_string()
        }
        Ok(_) => format!("{seconds:.2} s"),
        Err(_) => "–".into(),
    }
}

/// Formats a time in UTC.
pub fn time(since_1970: f64) -> String {
    utc(since_1970).unwrap_or_else(|| "–".into())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn no_text_is_markup() {
        let evil = "<script>alert(1)</script>\"' & \u{1b}[2J";
        let cell = text(evil).html("td");
        assert_eq!(
            cell,
            "<td>&lt;script&gt;alert(1)&lt;/script&gt;&quot;&#39; &amp; \\u001b[2J</td>"
        );
        let json = json_in_script(&serde_json::to_string(&evil).unwrap());
        assert!(!json.contains(['<', '>', '&']));
        assert_eq!(serde_json::from_str::<String>(&json).unwrap(), evil);
    }

    #[test]
    fn numbers_read_well() {
        let values =
            [None, Some(0.0), Some(2.345_678), Some(-12_345.6), Some(1e-5), Some(f64::NAN)];
        assert_eq!(values.map(digits), ["–", "0", "2.3457", "-12,346", "1.000e-5", "not finite"]);
        assert_eq!([5.25, 3723.0, -1.0].map(seconds), ["5.25 s", "1h 2m 3s", "–"]);
        assert_eq!(
            (time(0.0), time(1.7e9), time(1e300)),
            ("–".into(), "2023-11-14T22:13:20Z".into(), "–".into())
        );
    }
}
