//! Shell: the `rouse` command: dispatches to a component or a subcommand and reports errors.

use std::process::ExitCode;

use clap::Parser as _;

mod admin_pages;
mod apply;
mod args;
mod check;
mod cli;
mod command_error;
mod component;
mod component_pages;
mod delete;
mod describe;
mod documents;
mod get;
mod install;
mod kinds;
mod logging;
mod logs;
mod manifests;
mod routes;
mod run;
mod services;
mod stdout;
mod store;
mod table;
mod top;
mod trace;
mod up;
mod view;

/// Allocator of the process. It halves the start time of a controller: the C library's is slow where one thread frees
/// memory of another. The allocator mimalloc is as fast, but keeps three times as much memory for idle components.
#[global_allocator]
static ALLOCATOR: tikv_jemallocator::Jemalloc = tikv_jemallocator::Jemalloc;

fn main() -> ExitCode {
    match dispatch() {
        Ok(code) => code,
        Err(error) => {
            stdout::print_error(&command_error::error_line(&error));
            ExitCode::FAILURE
        }
    }
}

/// Runs a component if the first word names one, and otherwise the user's subcommand.
fn dispatch() -> anyhow::Result<ExitCode> {
    let mut args = std::env::args_os();
    // Looked at before clap: a component has flags and variables of its own, which may clash with those of the user.
    let command =
        args.nth(1).and_then(|word| component::ComponentCommand::from_word(word.to_str()?));
    match command {
        Some(command) => command.run(args).map(|()| ExitCode::SUCCESS),
        None => cli::RouseCli::parse().dispatch(),
    }
}
