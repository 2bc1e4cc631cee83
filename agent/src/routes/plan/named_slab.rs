//! Pure: entries by name, each with a number by which other entries refer to it.

use std::{collections::BTreeMap, ops::Bound, sync::Arc};

use common::wire::NamespacedName;

/// Entries by name. A reference to an entry is its number, which is valid until the entry is removed.
#[derive(Debug)]
pub(super) struct NamedSlab<T> {
    pub(super) numbers: BTreeMap<Arc<str>, u32>,
    entries: Vec<Option<(Arc<str>, T)>>,
    free: Vec<u32>,
}

impl<T> Default for NamedSlab<T> {
    fn default() -> Self {
        Self { numbers: BTreeMap::new(), entries: Vec::new(), free: Vec::new() }
    }
}

impl<T> NamedSlab<T> {
    /// Returns the number of the entry with this name.
    pub(super) fn find(&self, name: &NamespacedName) -> Option<u32> {
        self.numbers.get(name.to_string().as_str()).copied()
    }

    /// Returns the names of all entries.
    pub(super) fn names(&self) -> impl Iterator<Item = NamespacedName> {
        self.numbers
            .keys()
            .filter_map(|name| name.split_once('/'))
            .map(|(a, b)| NamespacedName::new(a, b))
    }

    /// Returns the name of an entry.
    pub(super) fn name(&self, number: u32) -> Option<NamespacedName> {
        let (name, _) = self.entries.get(number as usize)?.as_ref()?;
        name.split_once('/').map(|(a, b)| NamespacedName::new(a, b))
    }

    /// Returns the numbers of the entries whose names follow `name`, in the order of the names, `limit` at most.
    pub(super) fn numbers_after(&self, name: &str, limit: usize) -> Vec<u32> {
        let after = self.numbers.range::<str, _>((Bound::Excluded(name), Bound::Unbounded));
        after.map(|(_, &number)| number).take(limit).collect()
    }

    /// Returns an entry that has not been removed.
    pub(super) fn get(&self, number: u32) -> &T {
        let value = self.entries[number as usize].as_ref();
        value.map(|(_, value)| value).expect("kept while its number is in use")
    }

    /// Returns an entry that has not been removed, to be changed.
    pub(super) fn get_mut(&mut self, number: u32) -> &mut T {
        let value = self.entries[number as usize].as_mut();
        value.map(|(_, value)| value).expect("kept while its number is in use")
    }

    /// Inserts an entry. Returns its number, and the entry that had the name before.
    pub(super) fn insert(&mut self, name: &NamespacedName, value: T) -> (u32, Option<T>) {
        if let Some(number) = self.find(name) {
            return (number, Some(std::mem::replace(self.get_mut(number), value)));
        }
        let number = self.free.pop().unwrap_or_else(|| {
            self.entries.push(None);
            self.entries.len() as u32 - 1
        });
        let name: Arc<str> = name.to_string().into();
        self.entries[number as usize] = Some((Arc::clone(&name), value));
        self.numbers.insert(name, number);
        (number, None)
    }

    /// Returns the number of an entry, and makes an empty one if there is none.
    pub(super) fn get_or_insert(&mut self, name: &NamespacedName) -> u32
    where
        T: Default,
    {
        self.find(name).unwrap_or_else(|| self.insert(name, T::default()).0)
    }

    /// Removes an entry, and frees its number.
    pub(super) fn remove(&mut self, number: u32) -> Option<T> {
        let (name, value) = self.entries[number as usize].take()?;
        self.numbers.remove(&name);
        self.free.push(number);
        Some(value)
    }
}
