//! Pure: moments, UIDs and labels, small enough for ten thousand services.

use std::collections::BTreeMap;

use k8s_openapi::jiff;

/// A moment, in milliseconds since 1970. The clock that the shell passes never runs backwards.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
pub struct UnixMillis(pub u64);

impl UnixMillis {
    /// Returns the moment `later` milliseconds after this one.
    pub fn plus_ms(self, later: u64) -> Self {
        Self(self.0.saturating_add(later))
    }

    /// Formats the moment as Kubernetes writes times: RFC 3339, whole seconds.
    pub fn rfc3339(self) -> String {
        let seconds = i64::try_from(self.0 / 1000).unwrap_or_default();
        jiff::Timestamp::from_second(seconds).map(|time| time.to_string()).unwrap_or_default()
    }

    /// Returns the moment `seconds` after 1970 began. Moments before that become 1970.
    pub fn from_seconds(seconds: i64) -> Self {
        Self(u64::try_from(seconds).unwrap_or_default().saturating_mul(1000))
    }

    /// Returns the whole seconds since 1970.
    pub fn seconds(self) -> i64 {
        i64::try_from(self.0 / 1000).unwrap_or(i64::MAX)
    }

    /// Parses an RFC 3339 time; `None` for any other text, and for a time before 1970.
    pub fn parse(text: &str) -> Option<Self> {
        let time: jiff::Timestamp = text.parse().ok()?;
        u64::try_from(time.as_millisecond()).ok().map(Self)
    }
}

/// Formats a moment as RFC 3339. `seconds` are since 1970, and negative before that. Certificates may end later than
/// any moment that can be formatted, so such a moment is shown as the last one.
pub fn rfc3339_of_seconds(seconds: i64) -> String {
    let (first, last) = (jiff::Timestamp::MIN, jiff::Timestamp::MAX);
    let seconds = seconds.clamp(first.as_second(), last.as_second());
    jiff::Timestamp::from_second(seconds).unwrap_or(last).to_string()
}

/// A UUID, kept as a number.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
pub struct Uid(pub u128);

impl Uid {
    /// Derives a UID from `seed` and `parts`: equal parts give equal UIDs, different parts different ones.
    pub fn derive(seed: u128, parts: &[&str]) -> Self {
        // FNV-1a, 128 bit. The seed is random for each start, so that UIDs are unique forever.
        const PRIME: u128 = 0x0000_0000_0100_0000_0000_0000_0000_013B;
        // The offset basis of FNV-1a, in which the seed takes part.
        let mut hash = 0x6c62_272e_07bb_0142_62b8_2175_6295_c58d_u128 ^ seed;
        // The zero byte separates parts: without it `["ab", "c"]` and `["a", "bc"]` would share a UID.
        for byte in parts.iter().flat_map(|part| part.bytes().chain([0])) {
            hash = (hash ^ u128::from(byte)).wrapping_mul(PRIME);
        }
        // FNV mixes the last bytes into the low bits only; this spreads them over the whole number.
        hash ^= hash >> 61;
        hash = hash.wrapping_mul(PRIME) ^ (hash >> 67);
        // Version 4, variant 1: the bits that every reader of UUIDs expects.
        hash &= !(0xf000 << 64 | 0xc000 << 48);
        Self(hash | 0x4000 << 64 | 0x8000 << 48)
    }

    /// Parses the hexadecimal digits of a UUID, with or without dashes; `None` for any other text.
    pub fn parse(text: &str) -> Option<Self> {
        let digits = text.replace('-', "");
        // The standard library accepts a sign as well.
        let has_digits_only = digits.bytes().all(|byte| byte.is_ascii_hexdigit());
        has_digits_only.then(|| u128::from_str_radix(&digits, 16).ok().map(Self)).flatten()
    }
}

impl std::fmt::Display for Uid {
    fn fmt(&self, out: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let hex = format!("{:032x}", self.0);
        let (a, b, c, d, e) = (&hex[..8], &hex[8..12], &hex[12..16], &hex[16..20], &hex[20..]);
        write!(out, "{a}-{b}-{c}-{d}-{e}")
    }
}

/// Labels or annotations, sorted by key. For the usual two or three it takes a fifth of the memory of a `BTreeMap`.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct CompactStringMap(Box<[(Box<str>, Box<str>)]>);

impl CompactStringMap {
    /// Returns the value of `key`, if it is set.
    pub fn get(&self, key: &str) -> Option<&str> {
        let pair = self.0.iter().find(|(stored_key, _)| **stored_key == *key);
        pair.map(|(_, value)| &**value)
    }

    /// Returns true without any pair.
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// Returns true if `other` has each of these pairs, as the labels that a selector matches.
    pub fn is_subset_of(&self, other: &Self) -> bool {
        self.iter().all(|(key, value)| other.get(key) == Some(value))
    }

    /// Iterates over all pairs, in order of their keys.
    pub fn iter(&self) -> impl Iterator<Item = (&str, &str)> {
        self.0.iter().map(|(key, value)| (&**key, &**value))
    }

    /// Converts the pairs to the map that Kubernetes types hold.
    pub fn to_btree_map(&self) -> BTreeMap<String, String> {
        self.iter().map(|(key, value)| (key.to_owned(), value.to_owned())).collect()
    }
}

impl From<&BTreeMap<String, String>> for CompactStringMap {
    fn from(map: &BTreeMap<String, String>) -> Self {
        Self(map.iter().map(|(key, value)| (key.as_str().into(), value.as_str().into())).collect())
    }
}

/// Metadata that every object has beside its name.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct ObjectMetaSummary {
    /// UID of the object, unique forever.
    pub uid: Uid,
    /// Number that grows with each change of the spec (`metadata.generation`).
    pub generation: u32,
    /// Creation time of the object (`metadata.creationTimestamp`).
    pub created: UnixMillis,
}

impl ObjectMetaSummary {
    /// Returns true if the API server has created the object: it has a UID. A planned object has none yet.
    pub fn exists(&self) -> bool {
        self.uid != Uid(0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn times_of_certificates_are_formatted_in_every_year() {
        assert_eq!(rfc3339_of_seconds(1_000_000), "1970-01-12T13:46:40Z");
        assert_eq!(rfc3339_of_seconds(-1), "1969-12-31T23:59:59Z");
        // The end of certificates that never expire (RFC 5280, section 4.1.2.5).
        assert!(rfc3339_of_seconds(253_402_300_799).starts_with("9999-12-3"));
        assert!(!rfc3339_of_seconds(i64::MIN).is_empty());
    }

    #[test]
    fn a_uid_has_hexadecimal_digits_and_dashes_only() {
        let uid = Uid::parse("22b3de9e-076e-4e5d-a55d-aff10002527f").expect("a UID");
        assert_eq!(Uid::parse("22b3de9e076e4e5da55daff10002527f"), Some(uid));
        for text in ["", "-", "+1", "+2b3de9e-076e-4e5d-a55d-aff10002527f", "g"] {
            assert_eq!(Uid::parse(text), None, "{text:?}");
        }
    }

    #[test]
    fn seconds_and_milliseconds_are_converted() {
        assert_eq!(UnixMillis::from_seconds(7), UnixMillis(7000));
        assert_eq!(UnixMillis::from_seconds(-7), UnixMillis(0));
        assert_eq!(UnixMillis(7999).seconds(), 7);
    }
}
