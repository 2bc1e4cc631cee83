//! Pure: hashes of JSON values, and the annotation with the hash of the body that was applied last.

use std::{
    collections::BTreeMap,
    hash::{Hash as _, Hasher},
};

use serde_json::Value;

/// Annotation that holds the hash of the body that was applied last.
pub const APPLIED_ANNOTATION: &str = "rouse.dev/applied";

/// FNV-1a, 64 bit: stable across releases, unlike the standard library's hasher, since objects keep the hash.
struct Fnv1aHasher(u64);

impl Hasher for Fnv1aHasher {
    fn write(&mut self, bytes: &[u8]) {
        let step = |hash: u64, byte: &u8| (hash ^ u64::from(*byte)).wrapping_mul(0x100_0000_01b3);
        self.0 = bytes.iter().fold(self.0, step);
    }

    fn finish(&self) -> u64 {
        self.0
    }
}

/// Returns the hash of the body that the controller applied last to `object`, if any.
pub fn applied_hash(object: &Value) -> Option<u64> {
    let hash = object["metadata"]["annotations"][APPLIED_ANNOTATION].as_str()?;
    u64::from_str_radix(hash, 16).ok()
}

/// Returns a hash of a JSON value that does not depend on the order of its fields.
pub fn stable_json_hash(value: &Value) -> u64 {
    let mut hasher = Fnv1aHasher(0xcbf2_9ce4_8422_2325);
    hash_value(value, &mut hasher);
    hasher.finish()
}

fn hash_value(value: &Value, out: &mut Fnv1aHasher) {
    match value {
        Value::Null => 0_u8.hash(out),
        Value::Bool(it) => (1_u8, it).hash(out),
        Value::Number(it) => (2_u8, it.to_string()).hash(out),
        Value::String(it) => (3_u8, it).hash(out),
        Value::Array(all) => {
            (4_u8, all.len()).hash(out);
            all.iter().for_each(|it| hash_value(it, out));
        }
        Value::Object(fields) => {
            // The order of fields means nothing, and differs between writers.
            let sorted: BTreeMap<&String, &Value> = fields.iter().collect();
            (5_u8, sorted.len()).hash(out);
            for (key, value) in sorted {
                key.hash(out);
                hash_value(value, out);
            }
        }
    }
}
