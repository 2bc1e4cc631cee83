//! Pure: choice among the path prefixes of a host, the longest one that fits.
//!
//! Servers differ in how they read a path: some join `//`, take `%2F` or `\` for `/`, drop the parameters behind `;` or
//! resolve `..`. A path is matched only if all of these readings lead to the same prefix. So no request reaches a
//! service whose server would see a path outside of the prefix. All other paths are refused.

use std::{borrow::Cow, collections::BTreeMap, ops::Bound};

use smol_str::SmolStr;

/// Reason for which a host with path rules does not serve a path.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum HostPathError {
    /// No rule has the path.
    NoRule,
    /// Servers may read the path in several ways, for which several rules or none would count.
    UnclearPath,
}

/// Error of a path that servers may read as one of several prefixes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct UnclearPath;

/// Meaning of one segment of a path.
#[derive(Debug, PartialEq, Eq)]
enum SegmentReading<'a> {
    /// All servers read this text. Characters that need no encoding are decoded (RFC 3986 §6.2.2.2).
    Clear(Cow<'a, str>),
    /// The segment is the empty text behind a final `/`.
    End,
    /// Servers may read several segments, or none.
    Unclear,
    /// A server may leave the segments before it.
    Climbs,
}

/// Returns the value of the longest prefix that the path has, in whole segments. `None`: it has none of them.
///
/// The keys are path prefixes as they are compared, so the empty one has all paths. `*`, the path of `OPTIONS *`, has
/// only that one.
pub fn longest_prefix<'a, V>(
    rules: &'a BTreeMap<SmolStr, V>,
    path: &str,
) -> Result<Option<&'a V>, UnclearPath> {
    let whole = match_segments(rules, path, segment_itself)?;
    if has_parameters(path) && match_segments(rules, path, segment_without_parameters)? != whole {
        return Err(UnclearPath);
    }
    Ok(whole.and_then(|prefix| rules.get(prefix)))
}

/// Returns the longest prefix of the segments, each as `form` returns it.
fn match_segments<'a, V>(
    rules: &'a BTreeMap<SmolStr, V>,
    path: &str,
    form: impl Fn(&str) -> &str,
) -> Result<Option<&'a str>, UnclearPath> {
    // The empty prefix has every path, so it is the answer until a longer one fits.
    let mut found = rules.get_key_value("").map(|(key, _)| key.as_str());
    // The asterisk form is about the server as a whole (RFC 9112 §3.2.4), and has no segments.
    if path == "*" {
        return Ok(found);
    }
    // Segments that were read, with a final `/`.
    let mut base = "/".to_owned();
    let mut may_go_on = has_longer(rules, &base);
    let mut segments = path.strip_prefix('/').unwrap_or(path).split('/').peekable();
    while let Some(segment) = segments.next() {
        let is_last = segments.peek().is_none();
        // A `..` is refused even behind the last prefix: a server would leave the prefix by it (RFC 3986 §5.2.4).
        match read_segment(form(segment), is_last) {
            SegmentReading::Climbs => return Err(UnclearPath),
            SegmentReading::Unclear if may_go_on => return Err(UnclearPath),
            SegmentReading::Clear(text) if may_go_on => {
                // Whole segments only: `/shop` must not have `/shopping`.
                base.push_str(&text);
                if let Some((key, _)) = rules.get_key_value(base.as_str()) {
                    found = Some(key.as_str());
                }
                base.push('/');
                may_go_on = has_longer(rules, &base);
            }
            // No further segment changes the choice.
            SegmentReading::Clear(_) | SegmentReading::Unclear | SegmentReading::End => {}
        }
    }
    Ok(found)
}

/// Returns true if a prefix begins with `base`, which ends with `/`.
fn has_longer<V>(rules: &BTreeMap<SmolStr, V>, base: &str) -> bool {
    let from: (Bound<&str>, Bound<&str>) = (Bound::Included(base), Bound::Unbounded);
    rules.range::<str, _>(from).next().is_some_and(|(key, _)| key.starts_with(base))
}

fn segment_itself(segment: &str) -> &str {
    segment
}

/// Returns the segment without the parameters that some servers drop, as `a` of `a;v=1`.
fn segment_without_parameters(segment: &str) -> &str {
    parameters_at(segment).map_or(segment, |at| &segment[..at])
}

fn has_parameters(path: &str) -> bool {
    parameters_at(path).is_some()
}

/// Position of the first `;`, also if it is encoded.
fn parameters_at(text: &str) -> Option<usize> {
    let bytes = text.as_bytes();
    (0..bytes.len()).find(|&at| {
        bytes[at] == b';' || bytes[at..].get(..3).is_some_and(|it| it.eq_ignore_ascii_case(b"%3b"))
    })
}

/// Reads one segment of a path as servers may read it, decoded once or twice.
fn read_segment(segment: &str, is_last: bool) -> SegmentReading<'_> {
    if segment.is_empty() {
        return if is_last { SegmentReading::End } else { SegmentReading::Unclear };
    }
    // Twice, because some servers decode behind a proxy that has decoded already.
    let once = decode(segment.as_bytes(), |_| true);
    let twice = decode(&once, |_| true);
    let is_part_end = |byte: &u8| b"/\\".contains(byte);
    let mut parts = twice.split(is_part_end).map(part_name);
    let climbs = parts.clone().any(|part| part == b"..");
    // Encoded three times: what a server sees is not worth a guess.
    if climbs || matches!(decode(&twice, |_| true), Cow::Owned(_)) {
        return SegmentReading::Climbs;
    }
    let has_several_readings = matches!(twice, Cow::Owned(_))
        || twice.iter().any(|byte| b"/\\\0#?".contains(byte))
        || parts.any(|part| part == b".");
    if has_several_readings {
        return SegmentReading::Unclear;
    }
    match decode(segment.as_bytes(), is_unreserved) {
        Cow::Borrowed(_) => SegmentReading::Clear(segment.into()),
        // Only ASCII was decoded.
        Cow::Owned(bytes) => {
            SegmentReading::Clear(String::from_utf8_lossy(&bytes).into_owned().into())
        }
    }
}

/// Name of a part of a segment: some servers end it before parameters, at a zero byte, or where a decoded query begins.
fn part_name(part: &[u8]) -> &[u8] {
    part.split(|byte| b";\0#?".contains(byte)).next().unwrap_or_default()
}

/// Returns true if a path is `exact`, whose characters need no encoding, after such characters of it are decoded.
pub fn is_exact_path(path: &str, exact: &str) -> bool {
    *decode(path.as_bytes(), is_unreserved) == *exact.as_bytes()
}

/// Returns true for characters that need no encoding (RFC 3986 §2.3).
fn is_unreserved(byte: u8) -> bool {
    byte.is_ascii_alphanumeric() || b"-._~".contains(&byte)
}

/// Decodes the bytes that are percent-encoded and wanted. The result is borrowed if there are none.
fn decode(text: &[u8], is_wanted: impl Fn(u8) -> bool) -> Cow<'_, [u8]> {
    let mut decoded: Option<Vec<u8>> = None;
    let mut at = 0;
    while let Some(&byte) = text.get(at) {
        match encoded_byte(&text[at..]).filter(|it| is_wanted(*it)) {
            Some(byte) => {
                // The copy begins with the first byte that changes: most paths have none.
                decoded.get_or_insert_with(|| text[..at].to_vec()).push(byte);
                at += 3;
            }
            None => {
                if let Some(decoded) = &mut decoded {
                    decoded.push(byte);
                }
                at += 1;
            }
        }
    }
    decoded.map_or(Cow::Borrowed(text), Cow::Owned)
}

/// Byte that the text begins with, if it is percent-encoded.
fn encoded_byte(text: &[u8]) -> Option<u8> {
    let [b'%', high, low, ..] = text else { return None };
    let digit = |byte: &u8| char::from(*byte).to_digit(16);
    u8::try_from((digit(high)? << 4) | digit(low)?).ok()
}

/// Returns path and query without the first `depth` segments of the path, which begins with `/`.
///
/// Fails if the rest begins with `//` or `/\`, which browsers' parsers of URLs read alike: some servers would take what
/// follows for a host.
pub fn strip_segments(target: &[u8], depth: usize) -> Result<Vec<u8>, UnclearPath> {
    let rest = skip_segments(target, depth);
    match rest {
        [b'/', b'/' | b'\\', ..] => Err(UnclearPath),
        [b'/', ..] => Ok(rest.to_vec()),
        query => Ok([&b"/"[..], query].concat()),
    }
}

/// Returns the part of path and query behind the first `depth` segments of the path: from the next `/` on, else the query.
pub fn skip_segments(target: &[u8], depth: usize) -> &[u8] {
    let end = path_end(target);
    let mut slashes = (0..end).filter(|&at| target[at] == b'/');
    &target[slashes.nth(depth).unwrap_or(end)..]
}

/// Returns the position at which the path ends in path and query.
pub fn path_end(target: &[u8]) -> usize {
    target.iter().position(|byte| b"?#".contains(byte)).unwrap_or(target.len())
}

#[cfg(test)]
mod tests;
