//! Pure: `Strict-Transport-Security`, by which a browser uses https alone for a host (RFC 6797).

use std::fmt;

/// Longest policy, in bytes: a sanity limit for a header of each response.
const MAX_POLICY_BYTES: usize = 256;

/// Value of the header `Strict-Transport-Security`, in the grammar of RFC 6797, section 6.1.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct HstsPolicy(Box<str>);

/// Reason for which a text is no policy.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum HstsFault {
    /// The text has more than 256 bytes.
    #[error("it has more than 256 bytes")]
    TooLong,
    /// A directive does not follow the grammar.
    #[error("{0:?} is no directive: write NAME, NAME=TOKEN or NAME=\"TEXT\"")]
    MalformedDirective(String),
    /// A directive occurs more than once.
    #[error("{0} is given twice")]
    RepeatedDirective(String),
    /// The required directive is missing.
    #[error("max-age is missing")]
    NoMaxAge,
    /// The directive has no number of seconds.
    #[error("max-age must be a number of seconds")]
    BadMaxAge,
    /// The directive has a value.
    #[error("includeSubDomains must have no value")]
    IncludeSubDomainsWithValue,
}

impl HstsPolicy {
    /// Parses the value of the header: directives that are separated by `;`, in any order. `max-age` is required, and
    /// no directive may occur twice. Directives of other documents, such as `preload`, are accepted.
    pub fn parse(text: &str) -> Result<Self, HstsFault> {
        let text = text.trim_matches([' ', '\t']);
        if text.len() > MAX_POLICY_BYTES {
            return Err(HstsFault::TooLong);
        }
        let mut names: Vec<String> = Vec::new();
        let mut rest = text;
        while !rest.is_empty() {
            let (directive, behind) = split_directive(rest);
            rest = behind;
            let directive = directive.trim_matches([' ', '\t']);
            // The grammar permits empty ones.
            if directive.is_empty() {
                continue;
            }
            let name = check_directive(directive)?;
            if names.contains(&name) {
                return Err(HstsFault::RepeatedDirective(name));
            }
            names.push(name);
        }
        if !names.iter().any(|name| name == "max-age") {
            return Err(HstsFault::NoMaxAge);
        }
        Ok(Self(text.into()))
    }

    /// Returns the value of the header, which is printable ASCII.
    pub fn as_str(&self) -> &str {
        &self.0
    }
}

impl fmt::Display for HstsPolicy {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        out.write_str(&self.0)
    }
}

/// Splits a text behind its first directive. A `;` within quotes ends none.
fn split_directive(text: &str) -> (&str, &str) {
    let (mut is_quoted, mut is_escaped) = (false, false);
    for (at, byte) in text.bytes().enumerate() {
        match byte {
            _ if is_escaped => is_escaped = false,
            b'\\' if is_quoted => is_escaped = true,
            b'"' => is_quoted = !is_quoted,
            b';' if !is_quoted => return (&text[..at], &text[at + 1..]),
            _ => {}
        }
    }
    (text, "")
}

/// Checks a directive, which is not empty. Returns its name in lower case.
fn check_directive(directive: &str) -> Result<String, HstsFault> {
    let (name, value) = match directive.split_once('=') {
        Some((name, value)) => {
            (name.trim_end_matches([' ', '\t']), Some(value.trim_start_matches([' ', '\t'])))
        }
        None => (directive, None),
    };
    // A quoted value means the same as the token in it (RFC 6797, section 6.1).
    let content = value.map(|value| unquote(value).unwrap_or(value));
    let is_value = |value: &str| is_token(value) || unquote(value).is_some_and(is_quoted_text);
    if !is_token(name) || value.is_some_and(|value| !is_value(value)) {
        return Err(HstsFault::MalformedDirective(directive.to_owned()));
    }
    let name = name.to_ascii_lowercase();
    let is_number = |it: &str| !it.is_empty() && it.bytes().all(|byte| byte.is_ascii_digit());
    match name.as_str() {
        "max-age" if !content.is_some_and(is_number) => Err(HstsFault::BadMaxAge),
        "includesubdomains" if value.is_some() => Err(HstsFault::IncludeSubDomainsWithValue),
        _ => Ok(name),
    }
}

/// Returns the inside of a quoted string.
fn unquote(text: &str) -> Option<&str> {
    text.strip_prefix('"')?.strip_suffix('"')
}

/// Returns true for a token (RFC 9110, section 5.6.2).
fn is_token(text: &str) -> bool {
    let is_token_byte =
        |byte: u8| byte.is_ascii_alphanumeric() || b"!#$%&'*+-.^_`|~".contains(&byte);
    !text.is_empty() && text.bytes().all(is_token_byte)
}

/// Returns true for the inside of a quoted string: printable ASCII, where a backslash escapes the next byte.
fn is_quoted_text(text: &str) -> bool {
    let mut is_escaped = false;
    for byte in text.bytes() {
        match byte {
            b' '..=b'~' | b'\t' if is_escaped => is_escaped = false,
            b'\\' => is_escaped = true,
            b'"' => return false,
            b' '..=b'~' | b'\t' => {}
            _ => return false,
        }
    }
    !is_escaped
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn policies_of_the_grammar_are_kept_as_written() {
        for text in [
            "max-age=31536000",
            "max-age=31536000; includeSubDomains",
            "Max-Age=0",
            "max-age=\"31536000\"",
            "includeSubDomains;max-age=15768000",
            "max-age = 1 ; ; includesubdomains ;",
            ";max-age=1",
            "max-age=63072000; includeSubDomains; preload",
            "max-age=1; other=\"a;b \\\" c\"",
        ] {
            let policy = HstsPolicy::parse(text);
            assert_eq!(policy.as_ref().map(HstsPolicy::as_str), Ok(text));
        }
        let padded = HstsPolicy::parse("  max-age=1\t");
        assert_eq!(padded.as_ref().map(HstsPolicy::as_str), Ok("max-age=1"));
    }

    #[test]
    fn other_texts_are_refused_with_the_fault() {
        let malformed = |it: &str| HstsFault::MalformedDirective(it.to_owned());
        let repeated = |it: &str| HstsFault::RepeatedDirective(it.to_owned());
        let long = format!("max-age={}", "1".repeat(MAX_POLICY_BYTES));
        for (text, fault) in [
            ("", HstsFault::NoMaxAge),
            (";", HstsFault::NoMaxAge),
            ("includeSubDomains", HstsFault::NoMaxAge),
            ("max-age", HstsFault::BadMaxAge),
            ("max-age=\"\"", HstsFault::BadMaxAge),
            ("max-age=-1", HstsFault::BadMaxAge),
            ("max-age=1y", HstsFault::BadMaxAge),
            ("max-age=1; Max-Age=2", repeated("max-age")),
            ("max-age=1; preload; preload", repeated("preload")),
            ("max-age=1; includeSubDomains=true", HstsFault::IncludeSubDomainsWithValue),
            ("max-age=1, includeSubDomains", malformed("max-age=1, includeSubDomains")),
            ("max-age=1 includeSubDomains", malformed("max-age=1 includeSubDomains")),
            ("max-age=", malformed("max-age=")),
            ("=1", malformed("=1")),
            ("max-age=1; a=\"b", malformed("a=\"b")),
            ("max-age=1; a=\"b\\\"", malformed("a=\"b\\\"")),
            ("max-age=1; a=\"\u{e4}\"", malformed("a=\"\u{e4}\"")),
            ("max-age=1\r\nset-cookie: a", malformed("max-age=1\r\nset-cookie: a")),
            (long.as_str(), HstsFault::TooLong),
        ] {
            assert_eq!(HstsPolicy::parse(text), Err(fault), "{text:?}");
        }
    }
}
