//! Shell: an eBPF program that only lets packets pass, in and out: the least cost of any program on these hooks, and
//! the overhead that the kernel's statistics record.

use std::{fs::File, path::Path};

use anyhow::{Context as _, Result};
use aya::{
    Ebpf,
    programs::{CgroupAttachMode, CgroupSkb, CgroupSkbAttachType},
};

/// Empty programs, attached until this value is dropped.
#[derive(Debug)]
pub(crate) struct EmptyPrograms {
    ebpf: Ebpf,
}

const PROGRAMS: [(&str, CgroupSkbAttachType); 2] =
    [("empty_in", CgroupSkbAttachType::Ingress), ("empty_out", CgroupSkbAttachType::Egress)];

impl EmptyPrograms {
    pub(crate) fn attach(cgroup: &Path) -> Result<Self> {
        let cgroup = File::open(cgroup).context("cannot open the pods' cgroup")?;
        let mut ebpf = Ebpf::load(&build_object()).context("cannot load the empty programs")?;
        for (name, attach_type) in PROGRAMS {
            let program = ebpf.program_mut(name).context("the object has them")?;
            let program: &mut CgroupSkb = program.try_into()?;
            program.load()?;
            // The kernel always allows several programs on a link, and refuses the flag that asks for it.
            program.attach(&cgroup, attach_type, CgroupAttachMode::Single)?;
        }
        Ok(Self { ebpf })
    }

    /// Names and ids of the loaded programs.
    pub(crate) fn program_ids(&self) -> Result<Vec<(String, u32)>> {
        let programs = self.ebpf.programs();
        programs.map(|(name, program)| Ok((name.to_owned(), program.info()?.id()))).collect()
    }
}

/// Bytecode of the two instructions `r0 = 1; exit`.
const BYTECODE: [u8; 16] = [0xb7, 0, 0, 0, 1, 0, 0, 0, 0x95, 0, 0, 0, 0, 0, 0, 0];

/// Sizes and types from the ELF format (System V ABI).
const HEADER: usize = 64;
const SECTION: usize = 64;
const SYMBOL: usize = 24;
const PROGBITS: u32 = 1;
const SYMTAB: u32 = 2;
const STRTAB: u32 = 3;
/// Section flags of code: executable and allocated.
const CODE_FLAGS: u64 = 6;
/// Symbol type of a global function.
const FUNCTION: u8 = 1 << 4 | 2;
const BPF: u16 = 247;

/// Object file with both programs, built by hand: four sections after the empty one, and two symbols.
fn build_object() -> Vec<u8> {
    let names = b"\0cgroup_skb/ingress\0cgroup_skb/egress\0empty_in\0empty_out\0.symtab\0.strtab\0";
    let name_offset = |name: &str| {
        let offset = names.windows(name.len()).position(|it| it == name.as_bytes());
        offset.expect("a name in the table") as u32
    };
    let code = HEADER;
    let symbols = code + 2 * BYTECODE.len();
    let strings = symbols + 3 * SYMBOL;
    let sections = (strings + names.len()).next_multiple_of(8);

    let mut out = header(sections as u64);
    out.extend([BYTECODE, BYTECODE].concat());
    out.extend([0; SYMBOL]);
    out.extend(symbol(name_offset("empty_in"), 1));
    out.extend(symbol(name_offset("empty_out"), 2));
    out.extend(names);
    out.resize(sections, 0);
    out.extend([0; SECTION]);
    let of_code = |name, offset| {
        section(name_offset(name), PROGBITS, CODE_FLAGS, offset, BYTECODE.len(), [0; 3])
    };
    out.extend(of_code("cgroup_skb/ingress", code));
    out.extend(of_code("cgroup_skb/egress", code + BYTECODE.len()));
    // Link: strings are in section 4. Info: the first global symbol is number 1.
    out.extend(section(
        name_offset(".symtab"),
        SYMTAB,
        0,
        symbols,
        3 * SYMBOL,
        [4, 1, SYMBOL as u32],
    ));
    out.extend(section(name_offset(".strtab"), STRTAB, 0, strings, names.len(), [0; 3]));
    out
}

fn header(sections: u64) -> Vec<u8> {
    let order = if cfg!(target_endian = "big") { 2 } else { 1 };
    let mut out = vec![0x7f, b'E', b'L', b'F', 2, order, 1];
    out.resize(16, 0);
    // Relocatable, no entry, no program headers.
    out.extend([1, BPF].map(u16::to_ne_bytes).concat());
    out.extend(1_u32.to_ne_bytes());
    out.extend([0, 0, sections].map(u64::to_ne_bytes).concat());
    out.extend(0_u32.to_ne_bytes());
    let sizes = [HEADER as u16, 0, 0, SECTION as u16, 5, 4];
    out.extend(sizes.map(u16::to_ne_bytes).concat());
    out
}

fn symbol(name: u32, section: u16) -> Vec<u8> {
    let mut out = name.to_ne_bytes().to_vec();
    out.extend([FUNCTION, 0]);
    out.extend(section.to_ne_bytes());
    out.extend([0, BYTECODE.len() as u64].map(u64::to_ne_bytes).concat());
    out
}

/// Header of a section; `rest` is link, info, and size of an entry.
fn section(name: u32, kind: u32, flags: u64, offset: usize, len: usize, rest: [u32; 3]) -> Vec<u8> {
    let mut out = [name, kind].map(u32::to_ne_bytes).concat();
    out.extend([flags, 0, offset as u64, len as u64].map(u64::to_ne_bytes).concat());
    out.extend([rest[0], rest[1]].map(u32::to_ne_bytes).concat());
    out.extend([8, u64::from(rest[2])].map(u64::to_ne_bytes).concat());
    out
}
