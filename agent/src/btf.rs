//! Pure: where fields of the running kernel's structures are, read from the kernel's own description (BTF).
//!
//! The library reads BTF too, but shows no member of it. Format: Documentation/bpf/btf.rst.

use common::abi::{self, Bit, SocketFields};

/// Where the running kernel's description is.
pub(crate) const FILE: &str = "/sys/kernel/btf/vmlinux";

/// Length of what every type begins with: name, kind and count, size or type.
const TYPE: usize = 12;
/// Length of a member: name, type, bit.
const MEMBER: usize = 12;
/// How deep names and nameless members may stand in each other.
const DEEP: usize = 16;

/// Kinds that matter here, by their numbers.
const ARRAY: u32 = 3;
const STRUCT: u32 = 4;
const UNION: u32 = 5;
const FUNCTION: u32 = 12;
/// Typedef, volatile, const, restrict, type tag: other words for the type that they name.
const MODIFIERS: [u32; 5] = [8, 9, 10, 11, 18];

/// A kernel's types.
#[derive(Debug)]
pub(crate) struct Types<'a> {
    strings: &'a [u8],
    types: &'a [u8],
    /// Where each type begins, by its number; number 0 is `void`.
    begins: Vec<u32>,
}

/// A field of a structure: where it begins, in bytes and further bits, and the number of its type.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Field {
    at: u32,
    bit: u8,
    kind: u32,
}

impl<'a> Types<'a> {
    /// From the bytes of `/sys/kernel/btf/vmlinux`; `None` when they are not what they should be.
    pub(crate) fn read(bytes: &'a [u8]) -> Option<Self> {
        const MAGIC: u16 = 0xEB9F;
        if bytes.get(..2)? != MAGIC.to_ne_bytes() {
            return None;
        }
        // Header: magic, version, flags, its length; place and length of the types; the same of the names.
        let body = bytes.get(word(bytes, 4)? as usize..)?;
        let part = |at: usize| {
            let from = word(bytes, at)? as usize;
            body.get(from..from.checked_add(word(bytes, at + 4)? as usize)?)
        };
        let (types, strings) = (part(8)?, part(16)?);
        let mut begins = vec![0];
        let mut at = 0;
        while at < types.len() {
            begins.push(u32::try_from(at).ok()?);
            at += TYPE + tail(word(types, at + 4)?)?;
        }
        Some(Self { strings, types, begins })
    }

    /// Where the fields of sockets are that the kernel half reads; the name of one that is missing otherwise.
    pub(crate) fn socket_fields(&self) -> Result<SocketFields, &'static str> {
        let find = |of: &str, path: &'static str| self.place(of, path).ok_or(path);
        // Each of these structures begins with the one before.
        Ok(SocketFields {
            state: find("sock_common", "skc_state")?,
            backlog: find("sock", "sk_backlog.len")?,
            write_seq: find("tcp_sock", "write_seq")?,
            snd_una: find("tcp_sock", "snd_una")?,
            rcv_nxt: find("tcp_sock", "rcv_nxt")?,
            copied_seq: find("tcp_sock", "copied_seq")?,
            snd_wl1: find("tcp_sock", "snd_wl1")?,
            bytes_acked: find("tcp_sock", "bytes_acked")?,
            bytes_received: find("tcp_sock", "bytes_received")?,
        })
    }

    /// Where sockets keep whether IPv6 alone is taken; `None` where that is no single bit among their first bytes.
    pub(crate) fn v6_only(&self) -> Option<Bit> {
        let found = self.member(self.find(STRUCT, "sock_common")?, "skc_ipv6only", DEEP)?;
        let at = u8::try_from(found.at).ok().filter(|at| usize::from(*at) < abi::SOCKET_HEAD)?;
        // Counted from the lowest bit, or from the highest.
        let mask = if cfg!(target_endian = "big") { 0x80 >> found.bit } else { 1 << found.bit };
        Some(Bit { at, mask })
    }

    /// Number of a function.
    pub(crate) fn function(&self, name: &str) -> Option<u32> {
        self.find(FUNCTION, name)
    }

    /// Number of a type.
    fn find(&self, kind: u32, name: &str) -> Option<u32> {
        let is = |number: &usize| {
            let Some(begin) = self.begin(*number) else { return false };
            self.kind(begin) == Some(kind) && self.is_named(begin, name)
        };
        u32::try_from((1..self.begins.len()).find(is)?).ok()
    }

    /// Where `path` (`field` or `field.field`) is in a structure.
    fn place(&self, structure: &str, path: &str) -> Option<u16> {
        let start = Field { at: 0, bit: 0, kind: self.find(STRUCT, structure)? };
        let found = path.split('.').try_fold(start, |whole, name| {
            let inner = self.member(whole.kind, name, DEEP)?;
            Some(Field { at: whole.at.checked_add(inner.at)?, ..inner })
        })?;
        u16::try_from(found.at).ok()
    }

    /// A member of a structure or union, also of one without a name inside it.
    fn member(&self, of: u32, name: &str, deep: usize) -> Option<Field> {
        let deep = deep.checked_sub(1)?;
        let begin = self.composite(of)?;
        let info = word(self.types, begin + 4)?;
        // With this flag the high byte is the width of a bit field.
        let mask = if info >> 31 == 1 { 0x00FF_FFFF } else { u32::MAX };
        (0..count(info)).find_map(|index| {
            let member = begin + TYPE + index * MEMBER;
            let kind = word(self.types, member + 4)?;
            let bits = word(self.types, member + 8)? & mask;
            let at = bits / 8;
            if self.is_named(member, name) {
                return Some(Field { at, bit: (bits % 8) as u8, kind });
            }
            let inner = self.is_named(member, "").then(|| self.member(kind, name, deep))??;
            Some(Field { at: at.checked_add(inner.at)?, ..inner })
        })
    }

    /// Where a structure or union begins, seen through other names for it.
    fn composite(&self, mut number: u32) -> Option<usize> {
        for _ in 0..DEEP {
            let begin = self.begin(number as usize)?;
            match self.kind(begin)? {
                STRUCT | UNION => return Some(begin),
                kind if MODIFIERS.contains(&kind) => number = word(self.types, begin + 8)?,
                _ => return None,
            }
        }
        None
    }

    fn begin(&self, number: usize) -> Option<usize> {
        (number > 0).then(|| self.begins.get(number).map(|&begin| begin as usize))?
    }

    fn kind(&self, begin: usize) -> Option<u32> {
        Some(kind(word(self.types, begin + 4)?))
    }

    /// Whether the type or member at `begin` has this name.
    fn is_named(&self, begin: usize, name: &str) -> bool {
        let found = word(self.types, begin).and_then(|at| self.strings.get(at as usize..));
        found.is_some_and(|rest| {
            rest.starts_with(name.as_bytes()) && rest.get(name.len()) == Some(&0)
        })
    }
}

fn kind(info: u32) -> u32 {
    (info >> 24) & 0x1F
}

fn count(info: u32) -> usize {
    (info & 0xFFFF) as usize
}

/// How many bytes follow the first [`TYPE`] ones of a type; `None` for a kind that is not known.
fn tail(info: u32) -> Option<usize> {
    let each = match kind(info) {
        // Pointers, forwards, modifiers, functions, floats.
        2 | 7 | 8 | 9 | 10 | 11 | FUNCTION | 16 | 18 => 0,
        // Integers, variables, declaration tags.
        1 | 14 | 17 => return Some(4),
        ARRAY => return Some(12),
        // Structures, unions, sections, 64-bit enumerations.
        STRUCT | UNION | 15 | 19 => MEMBER,
        // Enumerations, parameters of functions.
        6 | 13 => 8,
        _ => return None,
    };
    Some(each * count(info))
}

fn word(bytes: &[u8], at: usize) -> Option<u32> {
    Some(u32::from_ne_bytes(bytes.get(at..at + 4)?.try_into().ok()?))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A description under construction: types and names.
    #[derive(Default)]
    struct Made {
        types: Vec<u8>,
        strings: Vec<u8>,
    }

    impl Made {
        fn name(&mut self, name: &str) -> u32 {
            let at = self.strings.len() as u32;
            self.strings.extend(name.bytes().chain([0]));
            at
        }

        fn add(&mut self, name: &str, info: u32, last: u32, rest: &[u32]) {
            let name = self.name(name);
            for word in [name, info, last].iter().chain(rest) {
                self.types.extend(word.to_ne_bytes());
            }
        }

        /// Members: name, type, byte.
        fn composite(&mut self, name: &str, kind: u32, members: &[(&str, u32, u32)]) {
            let rest: Vec<u32> =
                members.iter().flat_map(|&(name, of, at)| [self.name(name), of, at * 8]).collect();
            self.add(name, kind << 24 | members.len() as u32, 0, &rest);
        }

        fn bytes(&self) -> Vec<u8> {
            let mut bytes = [0x9F, 0xEB].to_vec();
            if cfg!(target_endian = "big") {
                bytes.reverse();
            }
            bytes.extend([1, 0]);
            let (types, strings) = (self.types.len() as u32, self.strings.len() as u32);
            for word in [24, 0, types, types, strings] {
                bytes.extend(word.to_ne_bytes());
            }
            [bytes, self.types.clone(), self.strings.clone()].concat()
        }
    }

    fn made() -> Vec<u8> {
        let mut made = Made::default();
        made.name("");
        made.add("int", 1 << 24, 4, &[32]);
        made.composite("", STRUCT, &[("rmem", 1, 0), ("len", 1, 4)]);
        made.composite("", UNION, &[("either", 1, 0), ("or", 1, 0)]);
        made.composite("sock", STRUCT, &[("first", 1, 0), ("", 3, 8), ("backlog", 6, 192)]);
        // A function of the same name, and the structure by another name.
        made.add("sock", 12 << 24, 1, &[]);
        made.add("alias", 8 << 24, 2, &[]);
        // With bit fields, whose width is the high byte of their place: here of one bit.
        let (reuse, v6_only) = (made.name("skc_reuse"), made.name("skc_ipv6only"));
        let members = [reuse, 1, (4 << 24) | (19 * 8), v6_only, 1, (1 << 24) | (19 * 8 + 5)];
        made.add("sock_common", 1 << 31 | STRUCT << 24 | 2, 0, &members);
        made.bytes()
    }

    #[test]
    fn a_field_is_found_by_its_path_through_names_and_unions() {
        let bytes = made();
        let types = Types::read(&bytes).expect("well made");
        assert_eq!(types.place("sock", "first"), Some(0));
        assert_eq!(types.place("sock", "or"), Some(8));
        assert_eq!(types.place("sock", "backlog.len"), Some(196));
        assert_eq!(types.place("sock", "first.len"), None);
        assert_eq!(types.place("sock", "last"), None);
        assert_eq!(types.place("socket", "first"), None);
        assert_eq!(types.socket_fields(), Err("skc_state"));
        assert_eq!(types.v6_only(), Some(Bit { at: 19, mask: 0x20 }));
        assert_eq!((types.function("sock"), types.function("alias")), (Some(5), None));
    }

    #[test]
    fn whatever_is_cut_off_or_altered_is_refused_or_read_without_harm() {
        let bytes = made();
        for end in 0..bytes.len() {
            assert!(Types::read(&bytes[..end]).is_none(), "{end}");
        }
        for at in 0..bytes.len() {
            let mut altered = bytes.clone();
            altered[at] ^= 0xFF;
            let read = Types::read(&altered);
            let _whatever = read.map(|types| types.place("sock", "backlog.len"));
        }
    }
}
