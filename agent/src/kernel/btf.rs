//! Pure: offsets of fields of the running kernel's structures, read from the kernel's own description (BTF).
//!
//! Aya reads BTF too, but exposes no members. Format: Documentation/bpf/btf.rst.

use datapath::abi::{self, SockFieldOffsets, SocketBit, TaskFlag};

/// Path of the running kernel's BTF.
pub(crate) const FILE: &str = "/sys/kernel/btf/vmlinux";

/// Length of a type's first part: name, kind and count, size or type.
const TYPE_BYTES: usize = 12;
/// Length of a member: name, type, bit.
const MEMBER_BYTES: usize = 12;
/// Highest depth of aliases and of unnamed members inside each other.
const DEPTH_MAX: usize = 16;

/// Kind of an array (BTF_KIND_*); only the kinds that matter here have a name.
const ARRAY: u32 = 3;
/// Kind of a structure type.
const STRUCT: u32 = 4;
/// Kind of a union type.
const UNION: u32 = 5;
/// Kind of a function.
const FUNCTION: u32 = 12;
/// Kinds of aliases: typedef, volatile, const, restrict, type tag. Each names another type.
const MODIFIERS: [u32; 5] = [8, 9, 10, 11, 18];

/// Types of a kernel, as its BTF describes them.
#[derive(Debug)]
pub(crate) struct KernelBtf<'a> {
    strings: &'a [u8],
    types: &'a [u8],
    /// Offset of each type, by its type id; id 0 is `void`.
    type_offsets: Vec<u32>,
}

/// Field of a structure: its offset in bytes and further bits, and the id of its type.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct BtfField {
    offset: u32,
    bit: u8,
    type_id: u32,
}

impl<'a> KernelBtf<'a> {
    /// Reads the bytes of `/sys/kernel/btf/vmlinux`; `None` if they are malformed.
    pub(crate) fn parse(bytes: &'a [u8]) -> Option<Self> {
        const MAGIC: u16 = 0xEB9F;
        if bytes.get(..2)? != MAGIC.to_ne_bytes() {
            return None;
        }
        // Header: magic, version, flags, header length; offset and length of the types, then of the names.
        let body = bytes.get(word(bytes, 4)? as usize..)?;
        let part = |at: usize| {
            let from = word(bytes, at)? as usize;
            body.get(from..from.checked_add(word(bytes, at + 4)? as usize)?)
        };
        let (types, strings) = (part(8)?, part(16)?);
        let mut type_offsets = vec![0];
        let mut at = 0;
        while at < types.len() {
            type_offsets.push(u32::try_from(at).ok()?);
            at += TYPE_BYTES + trailing_bytes(word(types, at + 4)?)?;
        }
        Some(Self { strings, types, type_offsets })
    }

    /// Returns the offsets of the socket fields that the eBPF programs read, or the name of one that is missing.
    pub(crate) fn socket_fields(&self) -> Result<SockFieldOffsets, &'static str> {
        let find = |of: &str, path: &'static str| self.field_offset(of, path).ok_or(path);
        // Each of these structures begins with the previous one, so offsets are from the socket's start.
        Ok(SockFieldOffsets {
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

    /// Returns the bit by which sockets are IPv6-only; `None` if it is not within their first bytes.
    pub(crate) fn v6_only(&self) -> Option<SocketBit> {
        let field =
            self.find_member(self.find_type(STRUCT, "sock_common")?, "skc_ipv6only", DEPTH_MAX)?;
        let byte_index = u8::try_from(field.offset)
            .ok()
            .filter(|index| usize::from(*index) < abi::SOCK_HEAD_BYTES)?;
        // BTF counts from the lowest bit on little-endian machines, from the highest on others.
        let mask = if cfg!(target_endian = "big") { 0x80 >> field.bit } else { 1 << field.bit };
        Some(SocketBit { byte_index, mask })
    }

    /// Returns the flag of kernel threads; `None` if tasks have no flags.
    pub(crate) fn kernel_thread_flag(&self) -> Option<TaskFlag> {
        let offset = self.field_offset("task_struct", "flags")?;
        Some(TaskFlag { mask: abi::KERNEL_THREAD_FLAG, offset, reserved: 0 })
    }

    /// Returns the type id of a function.
    pub(crate) fn function_id(&self, name: &str) -> Option<u32> {
        self.find_type(FUNCTION, name)
    }

    /// Returns the id of a type by its kind and name.
    fn find_type(&self, kind: u32, name: &str) -> Option<u32> {
        let is_wanted = |type_id: &usize| {
            let Some(begin) = self.type_offset(*type_id) else { return false };
            self.kind_at(begin) == Some(kind) && self.is_named(begin, name)
        };
        u32::try_from((1..self.type_offsets.len()).find(is_wanted)?).ok()
    }

    /// Returns the offset of `path` (`field` or `field.field`) in a structure.
    fn field_offset(&self, structure: &str, path: &str) -> Option<u16> {
        let start = BtfField { offset: 0, bit: 0, type_id: self.find_type(STRUCT, structure)? };
        let field = path.split('.').try_fold(start, |whole, name| {
            let inner = self.find_member(whole.type_id, name, DEPTH_MAX)?;
            Some(BtfField { offset: whole.offset.checked_add(inner.offset)?, ..inner })
        })?;
        u16::try_from(field.offset).ok()
    }

    /// Finds a member of a structure or union, also inside unnamed members.
    fn find_member(&self, type_id: u32, name: &str, depth_left: usize) -> Option<BtfField> {
        // Bounded, as a malformed description may refer to itself.
        let depth_left = depth_left.checked_sub(1)?;
        let begin = self.composite(type_id)?;
        let info = word(self.types, begin + 4)?;
        // With this flag the high byte is the width of a bit field.
        let mask = if info >> 31 == 1 { 0x00FF_FFFF } else { u32::MAX };
        (0..count(info)).find_map(|index| {
            let member = begin + TYPE_BYTES + index * MEMBER_BYTES;
            let type_id = word(self.types, member + 4)?;
            let bits = word(self.types, member + 8)? & mask;
            let offset = bits / 8;
            if self.is_named(member, name) {
                return Some(BtfField { offset, bit: (bits % 8) as u8, type_id });
            }
            let inner = self
                .is_named(member, "")
                .then(|| self.find_member(type_id, name, depth_left))??;
            Some(BtfField { offset: offset.checked_add(inner.offset)?, ..inner })
        })
    }

    /// Returns the offset of a structure or union, through any aliases of it.
    fn composite(&self, mut type_id: u32) -> Option<usize> {
        for _ in 0..DEPTH_MAX {
            let begin = self.type_offset(type_id as usize)?;
            match self.kind_at(begin)? {
                STRUCT | UNION => return Some(begin),
                kind if MODIFIERS.contains(&kind) => type_id = word(self.types, begin + 8)?,
                _ => return None,
            }
        }
        None
    }

    fn type_offset(&self, type_id: usize) -> Option<usize> {
        (type_id > 0).then(|| self.type_offsets.get(type_id).map(|&begin| begin as usize))?
    }

    fn kind_at(&self, begin: usize) -> Option<u32> {
        Some(kind(word(self.types, begin + 4)?))
    }

    /// Returns true if the type or member at `begin` has this name.
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

/// Returns the number of bytes after the first [`TYPE_BYTES`] bytes of a type; `None` for an unknown kind.
fn trailing_bytes(info: u32) -> Option<usize> {
    let each = match kind(info) {
        // Pointers, forwards, modifiers, functions, floats.
        2 | 7 | 8 | 9 | 10 | 11 | FUNCTION | 16 | 18 => 0,
        // Integers, variables, declaration tags.
        1 | 14 | 17 => return Some(4),
        ARRAY => return Some(12),
        // Structures, unions, sections, 64-bit enumerations.
        STRUCT | UNION | 15 | 19 => MEMBER_BYTES,
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

    /// BTF under construction: its types and names.
    #[derive(Default)]
    struct BtfFixture {
        types: Vec<u8>,
        strings: Vec<u8>,
    }

    impl BtfFixture {
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

        /// Adds a structure or union with members of name, type and byte.
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

    fn sample_btf() -> Vec<u8> {
        let mut made = BtfFixture::default();
        made.name("");
        made.add("int", 1 << 24, 4, &[32]);
        made.composite("", STRUCT, &[("rmem", 1, 0), ("len", 1, 4)]);
        made.composite("", UNION, &[("either", 1, 0), ("or", 1, 0)]);
        made.composite("sock", STRUCT, &[("first", 1, 0), ("", 3, 8), ("backlog", 6, 192)]);
        // A function of the same name, and an alias of the structure.
        made.add("sock", 12 << 24, 1, &[]);
        made.add("alias", 8 << 24, 2, &[]);
        // Bit fields have their width in the high byte of their offset: here one bit.
        let (reuse, v6_only) = (made.name("skc_reuse"), made.name("skc_ipv6only"));
        let members = [reuse, 1, (4 << 24) | (19 * 8), v6_only, 1, (1 << 24) | (19 * 8 + 5)];
        made.add("sock_common", 1 << 31 | STRUCT << 24 | 2, 0, &members);
        made.composite("task_struct", STRUCT, &[("usage", 1, 0), ("flags", 1, 44)]);
        made.bytes()
    }

    #[test]
    fn a_field_is_found_by_its_path_through_names_and_unions() {
        let bytes = sample_btf();
        let types = KernelBtf::parse(&bytes).expect("well made");
        assert_eq!(types.field_offset("sock", "first"), Some(0));
        assert_eq!(types.field_offset("sock", "or"), Some(8));
        assert_eq!(types.field_offset("sock", "backlog.len"), Some(196));
        assert_eq!(types.field_offset("sock", "first.len"), None);
        assert_eq!(types.field_offset("sock", "last"), None);
        assert_eq!(types.field_offset("socket", "first"), None);
        assert_eq!(types.socket_fields(), Err("skc_state"));
        assert_eq!(types.v6_only(), Some(SocketBit { byte_index: 19, mask: 0x20 }));
        let flag = TaskFlag { mask: abi::KERNEL_THREAD_FLAG, offset: 44, reserved: 0 };
        assert_eq!(types.kernel_thread_flag(), Some(flag));
        assert_eq!((types.function_id("sock"), types.function_id("alias")), (Some(5), None));
    }

    #[test]
    fn whatever_is_cut_off_or_altered_is_refused_or_read_without_harm() {
        let bytes = sample_btf();
        for end in 0..bytes.len() {
            assert!(KernelBtf::parse(&bytes[..end]).is_none(), "{end}");
        }
        for at in 0..bytes.len() {
            let mut altered = bytes.clone();
            altered[at] ^= 0xFF;
            let read = KernelBtf::parse(&altered);
            let _whatever = read.map(|types| types.field_offset("sock", "backlog.len"));
        }
    }
}
