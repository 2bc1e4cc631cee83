//! Shell: the `rouse` command: chooses what was asked for and reports how it ended.

use std::process::ExitCode;

use clap::Parser as _;

mod apply;
mod cli;
mod delete;
mod describe;
mod failure;
mod get;
mod kinds;
mod logs;
mod manifests;
mod out;
mod run;
mod store;
mod table;
mod top;
mod up;
mod view;

fn main() -> ExitCode {
    match cli::Cli::parse().dispatch() {
        Ok(code) => code,
        Err(error) => {
            out::complain(&failure::text(&error));
            ExitCode::FAILURE
        }
    }
}
