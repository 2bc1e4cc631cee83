//! Shell: results of the running kernel's verifier for each program, printed for `cargo xtask kernels`.
#![allow(clippy::print_stdout, reason = "the figures are for people and for `cargo xtask kernels`")]

use std::{env, fs};

use agent::{
    kernel::{
        features::VerifierFeatures,
        programs::{embedded_object, open_unloaded},
    },
    paths::AgentPaths,
};
use aya::{
    Btf, Ebpf, VerifierLogLevel,
    programs::{Program, ProgramError},
    util::KernelVersion,
};
use nix::{
    errno::Errno,
    sys::resource::{Resource, getrlimit, setrlimit},
};

use crate::fixture::{SharedKernelFixture, create_cgroups};

/// Half of the verifier's limit: a change of the verifier, or of a program, needs room.
const MAX_INSTRUCTIONS: u32 = 500_000;
/// Highest sum over all programs, since each start of an agent verifies them all. Measured were 641,000 on Linux 5.10
/// and 6.1, 575,000 on 6.12 and 582,000 on 6.18.
const MAX_TOTAL_INSTRUCTIONS: u32 = 750_000;
/// Program that closes connections under their locks; older kernels lack its helper.
const LOCKED_CLOSE_PROGRAM: &str = "end";
/// Number of lines of the verifier's log that are shown of a refused program.
const MAX_LOG_LINES: usize = 30;

/// Environment variable with the path of an object to load instead of the embedded one.
const OBJECT_VARIABLE: &str = "ROUSE_VERIFY_OBJECT";

/// Number of instructions that the verifier walked, or the reason of a refusal.
type WalkedInstructions = Result<u32, String>;

/// Each program is loaded by itself, so that a refused one hides no other.
#[test]
fn no_program_takes_more_than_half_of_what_the_verifier_walks() {
    let (paths, _guard) = create_cgroups();
    let open = |log| open_object(&paths, log);
    let mut programs = open(VerifierLogLevel::default());
    let mut for_counts = open(VerifierLogLevel::STATS);
    let has_locked_close =
        KernelVersion::current().expect("it has a version") >= KernelVersion::new(6, 5, 0);
    let (mut failures, mut total) = (Vec::new(), 0);
    for (name, program) in programs.programs_mut() {
        if name == LOCKED_CLOSE_PROGRAM && !has_locked_close {
            println!("verifier: {name} is for later kernels");
            continue;
        }
        let by_log = || walked_by_log(for_counts.program_mut(name).expect("the same object"));
        match verify_program(program, by_log) {
            Ok(count) => {
                println!("verifier: {name} {count}");
                total += count;
                if count > MAX_INSTRUCTIONS {
                    failures.push(format!("{name} takes {count} instructions"));
                }
            }
            Err(reason) => {
                println!("verifier: {name} refused");
                failures.push(format!("{name} is refused: {reason}"));
            }
        }
    }
    if total > MAX_TOTAL_INSTRUCTIONS {
        failures.push(format!("all programs together take {total} instructions"));
    }
    assert!(failures.is_empty(), "{}", failures.join("\n"));
}

/// Compares both sources of the count, on kernels that have both.
#[test]
fn the_log_tells_the_same_count_as_the_kernel() {
    let (paths, _guard) = create_cgroups();
    let open = || open_object(&paths, VerifierLogLevel::STATS);
    let (mut first, mut other) = (open(), open());
    let name = "getpeername4";
    let program = first.program_mut(name).expect("it is part of the object");
    load_program(program).expect("it is accepted");
    let by_log = walked_by_log(other.program_mut(name).expect("the same object"));
    let by_log = by_log.expect("it is accepted");
    assert_ne!(by_log, 0);
    if let Some(count) = program.info().expect("it is loaded").verified_instruction_count() {
        assert_eq!(by_log, count);
    }
}

#[test]
fn all_programs_are_in_force_side_by_side() {
    let mut shared = SharedKernelFixture::new();
    let fixture = &mut *shared;
    let programs = fixture.programs.as_ref().expect("the fixture loaded them");
    programs.verify_by_self_test(&mut fixture.maps).expect("it is seen");
    println!("verifier: {} programs loaded together", programs.verified_instructions().len());
}

/// Opens the object with its maps, without loading a program.
fn open_object(paths: &AgentPaths, log: VerifierLogLevel) -> Ebpf {
    let features = VerifierFeatures::detect();
    let loaded = match env::var_os(OBJECT_VARIABLE) {
        None => open_unloaded(embedded_object(), paths, features, log),
        Some(file) => {
            let object = fs::read(&file).expect("the object can be read");
            // The ELF parser needs aligned memory.
            let mut buffer = vec![0; object.len() + 8];
            let begin = buffer.as_ptr().align_offset(8);
            let aligned = &mut buffer[begin..][..object.len()];
            aligned.copy_from_slice(&object);
            open_unloaded(aligned, paths, features, log)
        }
    };
    loaded.expect("the maps can be made")
}

fn verify_program(
    program: &mut Program,
    by_log: impl FnOnce() -> WalkedInstructions,
) -> WalkedInstructions {
    load_program(program).map_err(|error| last_lines(&error))?;
    let info = program.info().map_err(|error| error.to_string())?;
    // The kernel reports the count since 5.16.
    info.verified_instruction_count().map_or_else(by_log, Ok)
}

/// Loads a program as its type demands.
pub(crate) fn load_program(program: &mut Program) -> Result<(), ProgramError> {
    match program {
        Program::CgroupSockAddr(program) => program.load(),
        Program::CgroupSock(program) => program.load(),
        Program::SockOps(program) => program.load(),
        Program::CgroupSkb(program) => program.load(),
        Program::SkLookup(program) => program.load(),
        Program::Iter(program) => program.load("tcp", &Btf::from_sys_fs()?),
        other => panic!("how to load a {:?} is not known here", other.prog_type()),
    }
}

/// Reads the count from the verifier's log, which the library shows only after a failure. Loading fails after the
/// verification in a process that may open no more files, because the kernel has no descriptor for the result. The
/// limit is the whole process's, and the tests of this tier run one at a time.
fn walked_by_log(program: &mut Program) -> WalkedInstructions {
    let (soft, hard) = getrlimit(Resource::RLIMIT_NOFILE).expect("its own limit");
    setrlimit(Resource::RLIMIT_NOFILE, 0, hard).expect("less is always allowed");
    let loaded = load_program(program);
    setrlimit(Resource::RLIMIT_NOFILE, soft, hard).expect("up to the hard limit");
    match loaded {
        Err(ProgramError::LoadError { io_error, verifier_log })
            if io_error.raw_os_error() == Some(Errno::EMFILE as i32) =>
        {
            let log = verifier_log.to_string();
            parse_walked(&log).ok_or_else(|| format!("the log has no count: {log}"))
        }
        Err(error) => Err(last_lines(&error)),
        Ok(()) => Err("there was a descriptor left".to_owned()),
    }
}

/// Parses the last line of the log: `processed 4321 insns (limit 1000000) …`.
fn parse_walked(log: &str) -> Option<u32> {
    let line = log.lines().rev().find_map(|line| line.strip_prefix("processed "))?;
    line.split(' ').next()?.parse().ok()
}

fn last_lines(error: &ProgramError) -> String {
    let text = match error {
        ProgramError::LoadError { io_error, verifier_log } => format!("{verifier_log}\n{io_error}"),
        other => other.to_string(),
    };
    let lines: Vec<&str> = text.lines().collect();
    lines[lines.len().saturating_sub(MAX_LOG_LINES)..].join("\n")
}

#[test]
fn the_count_is_read_from_the_logs_last_line() {
    let log = "processed 7 of them\nverification time 9 usec\nstack depth 320+0\n\
               processed 149 insns (limit 1000000) max_states_per_insn 0 total_states 12\n";
    assert_eq!(parse_walked(log), Some(149));
    assert_eq!(parse_walked("verification time 9 usec\n"), None);
}
