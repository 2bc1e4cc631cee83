//! Shell: what this kernel's verifier takes, told by programs of a few instructions that it is given to check.
//!
//! A version tells little: distributions carry helpers back to older kernels, and leave some out of newer ones.

use common::abi::Bit;

use crate::{
    btf::{self, Types},
    sys,
};

/// Kinds of programs (`enum bpf_prog_type`) and a way to attach them (`enum bpf_attach_type`).
const SOCK_OPS: u32 = 13;
const SOCK_ADDR: u32 = 18;
const CONNECT4: u32 = 10;

/// Helpers by their numbers (`include/uapi/linux/bpf.h`), which never change.
const PROBE_READ_KERNEL: i32 = 113;
const GET_NETNS_COOKIE: i32 = 122;
const SET_RETVAL: i32 = 187;
const SKC_TO_MPTCP_SOCK: i32 = 196;

/// The register that holds the end of the stack.
const STACK: u8 = 10;

/// Offset of `sk` in `struct bpf_sock_addr`.
const SOCKET: i16 = 64;

/// Helpers without which the eBPF programs take another way.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Features {
    /// A refused connect fails with ECONNREFUSED (usually 5.18), else with EPERM.
    pub set_retval: bool,
    /// A listener whose bind was not seen is known, too (usually 5.15).
    pub sock_ops_cookie: bool,
    /// A flow of Multipath TCP is known as such (usually 5.19, where that is built in).
    pub mptcp_sock: bool,
    /// By this a wildcard listener that takes IPv6 only is known as such; no bit where the kernel does not describe its
    /// types, or lets sock_ops read no memory of its own. Such a listener then counts as one of both families.
    pub v6_only: Bit,
}

impl Features {
    /// None of them, as on the oldest kernel.
    pub const NONE: Self = Self {
        set_retval: false,
        sock_ops_cookie: false,
        mptcp_sock: false,
        v6_only: Bit { at: 0, mask: 0 },
    };

    /// Asks the kernel.
    pub fn probe() -> Self {
        let first_argument = Instruction::number(1, -1);
        let socket = Instruction::load(1, 1, SOCKET);
        // Eight bytes from nowhere to the stack.
        let nowhere = [
            Instruction::copy(1, STACK),
            Instruction::add(1, -8),
            Instruction::number(2, 8),
            Instruction::number(3, 0),
        ];
        Self {
            set_retval: takes(SOCK_ADDR, CONNECT4, &[first_argument], SET_RETVAL),
            sock_ops_cookie: takes(SOCK_OPS, 0, &[], GET_NETNS_COOKIE),
            mptcp_sock: takes(SOCK_ADDR, CONNECT4, &[socket], SKC_TO_MPTCP_SOCK),
            v6_only: takes(SOCK_OPS, 0, &nowhere, PROBE_READ_KERNEL)
                .then(v6_only)
                .flatten()
                .unwrap_or_default(),
        }
    }
}

/// Where the kernel says that a socket keeps its IPV6_V6ONLY.
fn v6_only() -> Option<Bit> {
    Types::read(&std::fs::read(btf::FILE).ok()?)?.v6_only()
}

/// Whether the verifier takes a program that calls this helper with the context, or with what `before` makes of it.
fn takes(program: u32, attach: u32, before: &[Instruction], helper: i32) -> bool {
    let call = [Instruction::call(helper), Instruction::number(0, 1), Instruction::EXIT];
    let code: Vec<u64> = before.iter().copied().chain(call).map(|it| it.0).collect();
    sys::takes_program(program, attach, &code)
}

/// One instruction as the kernel reads it: code, registers, offset, number.
#[derive(Clone, Copy)]
struct Instruction(u64);

impl Instruction {
    const EXIT: Self = Self::new(0x95, 0, 0, 0);

    const fn new(code: u8, registers: u8, offset: i16, number: i32) -> Self {
        let (offset, number) = (offset as u16, number as u32);
        Self(code as u64 | (registers as u64) << 8 | (offset as u64) << 16 | (number as u64) << 32)
    }

    /// `register = number`
    const fn number(register: u8, number: i32) -> Self {
        Self::new(0xB7, register, 0, number)
    }

    /// `to = from`
    const fn copy(to: u8, from: u8) -> Self {
        Self::new(0xBF, to | from << 4, 0, 0)
    }

    /// `register += number`
    const fn add(register: u8, number: i32) -> Self {
        Self::new(0x07, register, 0, number)
    }

    /// `to = *(u64 *)(from + offset)`
    const fn load(to: u8, from: u8, offset: i16) -> Self {
        Self::new(0x79, to | from << 4, offset, 0)
    }

    const fn call(helper: i32) -> Self {
        Self::new(0x85, 0, 0, helper)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn instructions_stand_as_the_kernel_reads_them() {
        let bytes = |it: Instruction| it.0.to_le_bytes();
        assert_eq!(bytes(Instruction::number(1, -1)), [0xB7, 1, 0, 0, 255, 255, 255, 255]);
        assert_eq!(bytes(Instruction::copy(1, STACK)), [0xBF, 0xA1, 0, 0, 0, 0, 0, 0]);
        assert_eq!(bytes(Instruction::add(1, -8)), [0x07, 1, 0, 0, 0xF8, 255, 255, 255]);
        assert_eq!(bytes(Instruction::load(1, 1, SOCKET)), [0x79, 0x11, 64, 0, 0, 0, 0, 0]);
        assert_eq!(bytes(Instruction::call(187)), [0x85, 0, 0, 0, 187, 0, 0, 0]);
    }
}
