//! Pure: changes of headers that a rule of the Gateway API asks for.

use common::wire::HeaderChanges;
use http::{HeaderMap, HeaderName, HeaderValue};

/// Changes of headers in the form in which they are applied.
#[derive(Debug, Default)]
pub(crate) struct HeaderEdits {
    set: Box<[(HeaderName, HeaderValue)]>,
    add: Box<[(HeaderName, HeaderValue)]>,
    remove: Box<[HeaderName]>,
}

impl HeaderEdits {
    /// Makes the changes of a rule. The controller refuses names and values that are no headers; they have no effect.
    pub(crate) fn new(changes: &HeaderChanges) -> Self {
        let field = |(name, value): &(String, String)| {
            let name = HeaderName::try_from(name.as_str()).ok()?;
            Some((name, HeaderValue::try_from(value.as_str()).ok()?))
        };
        let name = |name: &String| HeaderName::try_from(name.as_str()).ok();
        Self {
            set: changes.set.iter().filter_map(field).collect(),
            add: changes.add.iter().filter_map(field).collect(),
            remove: changes.remove.iter().filter_map(name).collect(),
        }
    }

    /// Changes the headers of a message.
    pub(crate) fn apply(&self, headers: &mut HeaderMap) {
        for (name, value) in &self.set {
            headers.insert(name.clone(), value.clone());
        }
        for (name, value) in &self.add {
            headers.append(name.clone(), value.clone());
        }
        for name in &self.remove {
            headers.remove(name);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn headers_are_set_added_and_removed_whatever_their_case() {
        let pairs = |all: &[(&str, &str)]| {
            all.iter().map(|(name, value)| ((*name).to_owned(), (*value).to_owned())).collect()
        };
        let edits = HeaderEdits::new(&HeaderChanges {
            set: pairs(&[("X-Set", "new"), ("X-New", "1"), ("bad name", "1"), ("x-bad", "a\nb")]),
            add: pairs(&[("x-add", "2")]),
            remove: vec!["X-Gone".into()],
        });
        let mut headers = HeaderMap::new();
        for (name, value) in
            [("x-set", "a"), ("x-set", "b"), ("x-add", "1"), ("x-gone", "a"), ("x-gone", "b")]
        {
            headers.append(name, HeaderValue::from_static(value));
        }
        edits.apply(&mut headers);
        let mut all: Vec<(&str, &str)> = headers
            .iter()
            .map(|(name, value)| (name.as_str(), value.to_str().expect("ASCII")))
            .collect();
        all.sort_unstable();
        assert_eq!(all, [("x-add", "1"), ("x-add", "2"), ("x-new", "1"), ("x-set", "new")]);
    }
}
