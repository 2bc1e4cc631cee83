//! Shell: the `rouse` command: chooses what was asked for and reports how it ended.

use std::process::ExitCode;

use clap::Parser as _;

mod apply;
mod cli;
mod delete;
mod describe;
mod failure;
mod get;
mod install;
mod kinds;
mod logging;
mod logs;
mod manifests;
mod out;
mod part;
mod run;
mod store;
mod table;
mod top;
mod up;
mod view;

/// A controller that starts takes half as long as with the C library's, which is slow where one thread frees what another
/// one made. mimalloc is as fast and keeps three times as much memory for parts that have little to do.
#[global_allocator]
static ALLOCATOR: tikv_jemallocator::Jemalloc = tikv_jemallocator::Jemalloc;

fn main() -> ExitCode {
    match dispatch() {
        Ok(code) => code,
        Err(error) => {
            out::complain(&failure::text(&error));
            ExitCode::FAILURE
        }
    }
}

/// A part of Rouse if the first word names one, else what a person asks for.
fn dispatch() -> anyhow::Result<ExitCode> {
    let mut words = std::env::args_os();
    let part = words.nth(1).and_then(|word| part::Part::named(word.to_str()?));
    match part {
        Some(part) => part.run(words).map(|()| ExitCode::SUCCESS),
        None => cli::Cli::parse().dispatch(),
    }
}
