//! Pure: replacements of the path of a request, as rules of the Gateway API state them.

use smol_str::SmolStr;

/// Most bytes of a replacement.
const MAX_REPLACEMENT_BYTES: usize = 1024;

/// Replacement of the path of a request, or of the prefix by which its rule has matched it. The query stays.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum PathModifier {
    /// Path that replaces the whole path. It begins with `/`.
    FullPath(SmolStr),
    /// Prefix that replaces the prefix of the rule. It is empty, or begins with `/` and does not end with it.
    Prefix(SmolStr),
}

impl PathModifier {
    /// Parses the replacement of a whole path; `None`: the text is no path of a URL, or too long.
    pub fn parse_full_path(text: &str) -> Option<Self> {
        is_path(text).then(|| Self::FullPath(text.into()))
    }

    /// Parses the replacement of a prefix, in which one `/` at the end means nothing. `None`: the text is neither empty
    /// nor a path of a URL, or too long.
    pub fn parse_prefix(text: &str) -> Option<Self> {
        let bare = text.strip_suffix('/').unwrap_or(text);
        let is_prefix = bare.is_empty() || (is_path(bare) && !bare.ends_with('/'));
        is_prefix.then(|| Self::Prefix(bare.into()))
    }

    /// Text of the replacement.
    pub fn as_str(&self) -> &str {
        match self {
            Self::FullPath(text) | Self::Prefix(text) => text,
        }
    }
}

/// Returns true for the path of a URL (RFC 3986 §3.3). It must not begin with `//`, behind which some servers expect a
/// host.
fn is_path(text: &str) -> bool {
    let bytes = text.as_bytes();
    let is_plain = |byte: u8| byte.is_ascii_alphanumeric() || b"/-._~!$&'()*+,;=:@".contains(&byte);
    let is_encoded = |at: usize| {
        bytes.get(at + 1..at + 3).is_some_and(|digits| digits.iter().all(u8::is_ascii_hexdigit))
    };
    let is_part = |at: usize| if bytes[at] == b'%' { is_encoded(at) } else { is_plain(bytes[at]) };
    text.len() <= MAX_REPLACEMENT_BYTES
        && text.starts_with('/')
        && !text.starts_with("//")
        && (0..bytes.len()).all(is_part)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_replacement_is_a_path_of_a_url() {
        let long = format!("/{}", "a".repeat(MAX_REPLACEMENT_BYTES - 1));
        for text in ["/", "/a", "/a/", "/a//b", "/a%20b;v=1", "/~a:@b", &long] {
            let parsed = PathModifier::parse_full_path(text).expect("a path");
            assert_eq!((&parsed, parsed.as_str()), (&PathModifier::FullPath(text.into()), text));
        }
        let too_long = format!("{long}a");
        for text in ["", "a", "//a", "/a?b", "/a#b", "/a b", "/%4", "/%4g", "/\u{e9}", &too_long] {
            assert_eq!(PathModifier::parse_full_path(text), None, "{text}");
        }
    }

    #[test]
    fn a_slash_at_the_end_of_a_prefix_means_nothing() {
        for (text, kept) in [("", ""), ("/", ""), ("/a", "/a"), ("/a/", "/a"), ("/a/b/", "/a/b")] {
            let parsed = PathModifier::parse_prefix(text).expect("a prefix");
            assert_eq!(parsed, PathModifier::Prefix(kept.into()), "{text}");
            assert_eq!(PathModifier::parse_prefix(parsed.as_str()), Some(parsed.clone()));
        }
        for text in ["a", "//", "/a//", "//a", "/a?b", "/%4"] {
            assert_eq!(PathModifier::parse_prefix(text), None, "{text}");
        }
    }
}
