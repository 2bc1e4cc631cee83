//! Pure: items of RouteTable streams that the receiver has already, so that it decodes each of them once.
//!
//! Each stream begins with the whole table, of which the receiver has nearly all from the stream before. It compares
//! digests of encoded items. A digest takes less time than decoding, and less memory than the encoded item.

use std::{
    collections::HashMap,
    hash::{BuildHasher as _, BuildHasherDefault, Hash, Hasher, RandomState},
};

use crate::wire::RouteKey;

/// First byte of an encoded `RouteItem` that begins with its version: field 1, a varint.
const VERSION_TAG: u8 = 0x08;
/// Longest varint (Protocol Buffers, Encoding).
const MAX_VARINT_BYTES: usize = 10;

/// Digest of an encoded item without its version.
///
/// Both halves are hashes with secret keys. So no state that a user chooses has the digest of another one.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct ItemDigest(u64, u64);

impl Hash for ItemDigest {
    fn hash<H: Hasher>(&self, state: &mut H) {
        state.write_u64(self.0);
    }
}

/// Hasher of digests, which are hashes already.
#[derive(Clone, Copy, Debug, Default)]
struct DigestHasher(u64);

impl Hasher for DigestHasher {
    fn write(&mut self, bytes: &[u8]) {
        // Not used: a digest writes one number.
        bytes.iter().for_each(|byte| self.0 = self.0.rotate_left(8) ^ u64::from(*byte));
    }

    fn write_u64(&mut self, half: u64) {
        self.0 = half;
    }

    fn finish(&self) -> u64 {
        self.0
    }
}

/// Newest item of each subject of a RouteTable, by which an item that comes again is known.
#[derive(Debug)]
pub(super) struct KnownItems {
    /// Keys of the two halves of each digest.
    hash_keys: [RandomState; 2],
    /// Number of the open stream.
    stream: u32,
    /// Digest of the newest item of each subject.
    digests: HashMap<RouteKey, ItemDigest>,
    /// Number of the stream that has named the item last, by the item's digest. An item that is missing here is decoded,
    /// although its subject is known.
    named_in: HashMap<ItemDigest, u32, BuildHasherDefault<DigestHasher>>,
    /// Number of subjects whose newest item the open stream has named.
    named: usize,
}

impl KnownItems {
    /// Begins without items. `hash_keys` are random.
    pub(super) fn new(hash_keys: [RandomState; 2]) -> Self {
        let (digests, named_in) = (HashMap::new(), HashMap::default());
        Self { hash_keys, stream: 0, digests, named_in, named: 0 }
    }

    /// Begins another stream, which has named nothing yet.
    pub(super) fn begin_stream(&mut self) {
        self.stream = self.stream.wrapping_add(1);
        self.named = 0;
    }

    /// Returns the digest of an encoded item.
    pub(super) fn digest(&self, item: &[u8]) -> ItemDigest {
        let state = without_version(item);
        let [one, other] = self.hash_keys.each_ref().map(|keys| keys.hash_one(state));
        ItemDigest(one, other)
    }

    /// Returns true if the item with this digest is the newest one of its subject. It then counts as named by the open
    /// stream.
    pub(super) fn recall(&mut self, digest: ItemDigest) -> bool {
        let Some(named_in) = self.named_in.get_mut(&digest) else { return false };
        if std::mem::replace(named_in, self.stream) != self.stream {
            self.named += 1;
        }
        true
    }

    /// Records the newest item of a subject.
    pub(super) fn record(&mut self, key: &RouteKey, digest: ItemDigest) {
        let before = match self.digests.get_mut(key) {
            Some(newest) => Some(std::mem::replace(newest, digest)),
            None => self.digests.insert(key.clone(), digest),
        };
        let was_named = before.and_then(|it| self.named_in.remove(&it)) == Some(self.stream);
        self.named_in.insert(digest, self.stream);
        self.named += usize::from(!was_named);
    }

    /// Makes the next item of a subject count as new, whatever it is. The subject stays known.
    pub(super) fn forget(&mut self, key: &RouteKey) {
        let named_in = self.digests.get(key).and_then(|newest| self.named_in.remove(newest));
        self.named -= usize::from(named_in == Some(self.stream));
    }

    /// Returns true if the subject has had an item, and was not removed.
    pub(super) fn knows(&self, key: &RouteKey) -> bool {
        self.digests.contains_key(key)
    }

    /// Removes a subject.
    pub(super) fn remove(&mut self, key: &RouteKey) {
        self.forget(key);
        self.digests.remove(key);
    }

    /// Returns the subjects that the open stream has not named, except for those that `is_changed` names.
    pub(super) fn unnamed(&self, is_changed: impl Fn(&RouteKey) -> bool) -> Vec<RouteKey> {
        // Mostly there are none, and the walk through all subjects is spared.
        if self.named == self.digests.len() {
            return Vec::new();
        }
        let is_named = |newest: &ItemDigest| self.named_in.get(newest) == Some(&self.stream);
        let unnamed = self.digests.iter().filter(|(_, newest)| !is_named(newest));
        unnamed.map(|(key, _)| key).filter(|key| !is_changed(key)).cloned().collect()
    }
}

/// Returns what an encoded item states beside its version, by which each stream numbers the same states in its own way.
///
/// A sender may encode the fields in another order. Then the version stays in the result, and the item counts as new.
fn without_version(item: &[u8]) -> &[u8] {
    let Some((&VERSION_TAG, rest)) = item.split_first() else { return item };
    let end = rest.iter().take(MAX_VARINT_BYTES).position(|byte| byte & 0x80 == 0);
    end.map_or(item, |end| &rest[end + 1..])
}

#[cfg(test)]
mod tests {
    use prost::Message as _;

    use super::*;
    use crate::{
        fixtures,
        wire::{ActivatorEntry, RouteChange, RouteItem, raw},
    };

    fn known_items() -> KnownItems {
        KnownItems::new([RandomState::new(), RandomState::new()])
    }

    fn key(name: &str) -> RouteKey {
        RouteKey::Activator(name.to_owned())
    }

    /// Encodes the state of an activator on this node.
    fn encoded(version: u64, name: &str, node: &str) -> Vec<u8> {
        let entry = ActivatorEntry { node: node.into(), ..fixtures::activator(name, Vec::new()) };
        let change = RouteChange::Activator(entry);
        raw::RouteItem::from(RouteItem { version, change }).encode_to_vec()
    }

    #[test]
    fn an_item_is_known_by_its_state_whatever_its_version() {
        let mut items = known_items();
        let first = items.digest(&encoded(7, "a", "n1"));
        assert!(!items.recall(first));
        items.record(&key("a"), first);
        for version in [0, 1, 127, 128, u64::MAX] {
            let again = items.digest(&encoded(version, "a", "n1"));
            assert!(items.recall(again), "{version}");
        }
        for (name, node) in [("a", "n2"), ("b", "n1"), ("", "")] {
            let other = items.digest(&encoded(7, name, node));
            assert!(!items.recall(other), "{name} {node}");
        }
    }

    #[test]
    fn bytes_that_are_no_version_stay() {
        let long = [&[VERSION_TAG][..], &[0xff; 12]].concat();
        let items: [&[u8]; 5] = [&[], &[0x12, 0], &[VERSION_TAG], &[VERSION_TAG, 0x80], &long];
        for item in items {
            assert_eq!(without_version(item), item);
        }
        assert_eq!(without_version(&[VERSION_TAG, 0x80, 1, 0x12, 0]), [0x12, 0]);
    }

    #[test]
    fn only_the_newest_item_of_a_subject_is_known() {
        let mut items = known_items();
        let [one, other] = ["n1", "n2"].map(|node| items.digest(&encoded(1, "a", node)));
        items.record(&key("a"), one);
        items.record(&key("a"), other);
        assert_eq!([items.recall(one), items.recall(other)], [false, true]);
        items.forget(&key("a"));
        assert_eq!((items.recall(other), items.knows(&key("a"))), (false, true));
        items.record(&key("a"), other);
        items.remove(&key("a"));
        assert_eq!((items.recall(other), items.knows(&key("a"))), (false, false));
        assert!(items.named_in.is_empty());
    }

    #[test]
    fn subjects_that_a_stream_does_not_name_are_found() {
        let mut items = known_items();
        let digests = ["a", "b", "c"].map(|name| items.digest(&encoded(1, name, "n1")));
        let record_all = |items: &mut KnownItems| {
            for (name, digest) in ["a", "b", "c"].into_iter().zip(digests) {
                items.record(&key(name), digest);
            }
        };
        record_all(&mut items);
        items.begin_stream();
        // Named twice, by a sender that repeats itself.
        assert!(items.recall(digests[0]) && items.recall(digests[0]));
        let mut unnamed = items.unnamed(|_| false);
        unnamed.sort();
        assert_eq!(unnamed, [key("b"), key("c")]);
        assert_eq!(items.unnamed(|it| *it == key("b")), [key("c")]);
        items.forget(&key("a"));
        assert_eq!(items.unnamed(|_| false).len(), 3);
        record_all(&mut items);
        assert_eq!((items.unnamed(|_| false), items.named), (Vec::new(), 3));
        items.remove(&key("b"));
        assert_eq!((items.unnamed(|_| false), items.named), (Vec::new(), 2));
    }
}
