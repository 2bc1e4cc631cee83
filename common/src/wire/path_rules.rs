//! Pure: rules for the paths of a host, and hosts with a wildcard.

use std::fmt;

use smol_str::SmolStr;

/// Most bytes of a path prefix.
const MAX_PREFIX_BYTES: usize = 256;

/// Rule of a DomainMapping that shares its host with others by their paths, or whose host has a wildcard.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct PathRule {
    /// Paths that the mapping serves.
    pub prefix: PathPrefix,
    /// True if pods receive the path without the prefix.
    pub strips_prefix: bool,
}

/// Prefix of paths in whole segments: `/a` is the prefix of `/a` and `/a/b`, but not of `/ab`.
///
/// It is empty for all paths. Otherwise it begins with `/` and does not end with it. Segments have unreserved
/// characters of RFC 3986 only, which every server reads in the same way.
#[derive(Clone, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct PathPrefix(SmolStr);

/// Fault of a text that is no path prefix.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum PathPrefixFault {
    /// The text does not begin with `/`.
    #[error("it must begin with /")]
    NotAbsolute,
    /// The text has more bytes than a prefix may have.
    #[error("it must have at most {MAX_PREFIX_BYTES} bytes")]
    TooLong,
    /// A segment is empty.
    #[error("it must not have // in it")]
    EmptySegment,
    /// A segment is `.` or `..`.
    #[error("it must not have the segments . and ..")]
    DotSegment,
    /// A character could be read in several ways.
    #[error("its segments may have letters, digits, -, ., _ and ~ only")]
    ReservedCharacter,
}

impl PathPrefix {
    /// Prefix of all paths.
    pub const ALL: Self = Self(SmolStr::new_static(""));

    /// Parses a prefix. `/` means all paths, and one `/` at the end is left out.
    pub fn parse(text: &str) -> Result<Self, PathPrefixFault> {
        let Some(rest) = text.strip_prefix('/') else { return Err(PathPrefixFault::NotAbsolute) };
        if text.len() > MAX_PREFIX_BYTES {
            return Err(PathPrefixFault::TooLong);
        }
        if rest.is_empty() {
            return Ok(Self::ALL);
        }
        let bare = text.strip_suffix('/').unwrap_or(text);
        for segment in bare.split('/').skip(1) {
            check_segment(segment)?;
        }
        Ok(Self(bare.into()))
    }

    /// Prefix as it is compared: empty for all paths, else with `/` at the begin and none at the end.
    pub fn as_str(&self) -> &str {
        &self.0
    }

    /// Number of segments; 0 for all paths.
    pub fn depth(&self) -> usize {
        self.0.bytes().filter(|byte| *byte == b'/').count()
    }
}

impl fmt::Display for PathPrefix {
    /// Writes the prefix as users write it: `/` for all paths.
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        out.write_str(if self.0.is_empty() { "/" } else { &self.0 })
    }
}

fn check_segment(segment: &str) -> Result<(), PathPrefixFault> {
    let is_unreserved = |byte: u8| byte.is_ascii_alphanumeric() || b"-._~".contains(&byte);
    match segment {
        "" => Err(PathPrefixFault::EmptySegment),
        "." | ".." => Err(PathPrefixFault::DotSegment),
        _ if segment.bytes().all(is_unreserved) => Ok(()),
        _ => Err(PathPrefixFault::ReservedCharacter),
    }
}

/// Returns what hosts of a wildcard end with, as `.example.com` for `*.example.com`. `None`: the host has no wildcard.
pub fn wildcard_suffix(host: &str) -> Option<&str> {
    host.strip_prefix('*').filter(|suffix| suffix.starts_with('.'))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_prefix_has_whole_segments_of_characters_that_have_one_reading() {
        for (text, kept, depth) in
            [("/", "", 0), ("/a", "/a", 1), ("/a/", "/a", 1), ("/a/B.c_~-9", "/a/B.c_~-9", 2)]
        {
            let prefix = PathPrefix::parse(text).expect("a prefix");
            assert_eq!((prefix.as_str(), prefix.depth()), (kept, depth), "{text}");
        }
        assert_eq!(PathPrefix::ALL.to_string(), "/");
        let long = format!("/{}", "a".repeat(MAX_PREFIX_BYTES));
        for (text, fault) in [
            ("", PathPrefixFault::NotAbsolute),
            ("a", PathPrefixFault::NotAbsolute),
            ("//", PathPrefixFault::EmptySegment),
            ("/a//", PathPrefixFault::EmptySegment),
            ("/a//b", PathPrefixFault::EmptySegment),
            ("/.", PathPrefixFault::DotSegment),
            ("/a/../b", PathPrefixFault::DotSegment),
            ("/a;b", PathPrefixFault::ReservedCharacter),
            ("/%61", PathPrefixFault::ReservedCharacter),
            ("/a*", PathPrefixFault::ReservedCharacter),
            ("/a?b", PathPrefixFault::ReservedCharacter),
            ("/caf\u{e9}", PathPrefixFault::ReservedCharacter),
            (long.as_str(), PathPrefixFault::TooLong),
        ] {
            assert_eq!(PathPrefix::parse(text), Err(fault), "{text:?}");
        }
    }

    #[test]
    fn a_wildcard_is_the_whole_first_label() {
        assert_eq!(wildcard_suffix("*.example.com"), Some(".example.com"));
        for host in ["example.com", "*", "*a.example.com", "a.*.example.com", ""] {
            assert_eq!(wildcard_suffix(host), None, "{host}");
        }
    }
}
