//! Pure: escaping of texts from clients, and numbers in Go's format.

use std::{borrow::Cow, fmt::Write as _};

use super::MAX_VALUE_BYTES;

/// Cuts a text to [`MAX_VALUE_BYTES`] bytes, followed by three dots.
pub(super) fn truncate_value(text: Cow<'_, str>) -> Cow<'_, str> {
    if text.len() <= MAX_VALUE_BYTES {
        return text;
    }
    let end = text.floor_char_boundary(MAX_VALUE_BYTES);
    let (kept, _left_out) = text.split_at(end);
    format!("{kept}...").into()
}

/// Implements Go's `JSEscape` so that the result is valid JSON too: `'` becomes `\u0027`, since JSON has no `\'`.
/// Characters beyond 16 bits become surrogate pairs.
pub(super) fn escape_js(text: &str) -> String {
    let mut out = String::with_capacity(text.len() + 16);
    for it in text.chars() {
        match it {
            '\\' => out.push_str(r"\\"),
            '"' => out.push_str(r#"\""#),
            '\'' | '<' | '>' | '&' | '=' => push_unicode_escape(&mut out, it),
            it if it.is_ascii_control() => push_unicode_escape(&mut out, it),
            it if it.is_ascii() || is_printable(it) => out.push(it),
            it => push_unicode_escape(&mut out, it),
        }
    }
    out
}

fn push_unicode_escape(out: &mut String, character: char) {
    for half in character.encode_utf16(&mut [0; 2]) {
        write!(out, "\\u{half:04X}").expect("a String takes everything");
    }
}

/// Implements Go's `unicode.IsPrint` beyond ASCII, by the rules of the standard library's debug output.
fn is_printable(character: char) -> bool {
    // Behind another character, because `escape_debug` escapes a combining one only at the begin of a text.
    let mut pair = [b'x'; 5];
    let length = 1 + character.encode_utf8(&mut pair[1..]).len();
    let pair = std::str::from_utf8(&pair[..length]).unwrap_or_default();
    pair.escape_debug().nth(1) == Some(character)
}

/// Implements Go's `HTMLEscape` of text/template.
pub(super) fn escape_html(text: &str) -> String {
    let mut out = String::with_capacity(text.len() + 16);
    for it in text.chars() {
        match it {
            '\0' => out.push('\u{fffd}'),
            '"' => out.push_str("&#34;"),
            '\'' => out.push_str("&#39;"),
            '&' => out.push_str("&amp;"),
            '<' => out.push_str("&lt;"),
            '>' => out.push_str("&gt;"),
            it => out.push(it),
        }
    }
    out
}

/// Implements Go's `url.QueryEscape` for one text.
pub(super) fn escape_url_query(text: &str) -> String {
    let mut out = String::with_capacity(text.len() + 16);
    for byte in text.bytes() {
        match byte {
            b' ' => out.push('+'),
            b'-' | b'_' | b'.' | b'~' => out.push(char::from(byte)),
            byte if byte.is_ascii_alphanumeric() => out.push(char::from(byte)),
            byte => write!(out, "%{byte:02X}").expect("a String takes everything"),
        }
    }
    out
}

/// Decodes percent escapes as Go's `URL.Path` does; returns the text unchanged if one is malformed.
pub(super) fn decode_percent(text: &str) -> Cow<'_, str> {
    if !text.contains('%') {
        return text.into();
    }
    let (mut out, mut rest) = (Vec::with_capacity(text.len()), text.as_bytes());
    while let Some((&byte, after)) = rest.split_first() {
        rest = after;
        if byte != b'%' {
            out.push(byte);
            continue;
        }
        let digit = |at: usize| char::from(*after.get(at)?).to_digit(16);
        // Go refuses such a URL. Here the request is served all the same, so its path is logged as sent.
        let (Some(high), Some(low)) = (digit(0), digit(1)) else { return text.into() };
        out.push(u8::try_from(high * 16 + low).unwrap_or(b'%'));
        rest = after.get(2..).unwrap_or_default();
    }
    // Decoded bytes need not be UTF-8, but a line of the log must be.
    String::from_utf8_lossy(&out).into_owned().into()
}

/// Returns true if a character would end or garble a line.
fn breaks_line(character: char) -> bool {
    character.is_control() || matches!(character, '\u{2028}' | '\u{2029}')
}

/// Appends a value; characters that would break the line are written as escapes.
pub(super) fn push_line_value(line: &mut String, value: &str) {
    if !value.contains(breaks_line) {
        return line.push_str(value);
    }
    for it in value.chars() {
        if breaks_line(it) {
            push_unicode_escape(line, it);
        } else {
            line.push(it);
        }
    }
}

/// Formats a number as Go prints a `float64`: the shortest that reads back equal, with an exponent below 0.0001.
pub(super) fn format_go_float(value: f64) -> String {
    let size = value.abs();
    // JSON has neither infinity nor NaN.
    if !value.is_finite() {
        return "0".to_owned();
    }
    if value == 0.0 || (1e-4..1e21).contains(&size) {
        return value.to_string();
    }
    let text = format!("{value:e}");
    let (digits, exponent) = text.split_once('e').unwrap_or((&text, "0"));
    let (sign, exponent) = match exponent.strip_prefix('-') {
        Some(exponent) => ('-', exponent),
        None => ('+', exponent),
    };
    // Go writes a sign and at least two digits of the exponent.
    format!("{digits}e{sign}{exponent:0>2}")
}
