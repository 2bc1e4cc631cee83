//! Shell: the activator as a gateway, beside nginx, HAProxy, Envoy and Go's ReverseProxy, each on one core.

mod peers;
mod rows;

use std::{fs, path::PathBuf};

use anyhow::{Context as _, Result, bail};

pub(super) use self::rows::CASES;
use self::rows::GatewayBenchOutput;
use super::{BenchArgs, CaseSelection, case_results::CaseResults, report::BenchRow};
use crate::{
    build_ebpf,
    setup::{self, SetupPurpose},
    sh,
    workspace::CargoWorkspace,
};

/// Arguments for the bench `gateway` alone.
#[derive(Clone, Debug, Default, clap::Args)]
pub(super) struct GatewayBenchArgs {
    /// Program of an earlier commit, whose gateway the bench gateway measures as well, as `old`
    #[arg(long, value_name = "FILE")]
    old: Option<PathBuf>,
}

impl GatewayBenchArgs {
    /// Checks the arguments. `is_chosen`: the bench will run.
    pub(super) fn check(&self, is_chosen: bool) -> Result<()> {
        if !is_chosen && self.old.is_some() {
            bail!("--old is for the bench gateway: name it as well");
        }
        Ok(())
    }
}

/// Programs and settings of the bench.
#[derive(Debug)]
pub(super) struct GatewayBenchContext {
    rouse: PathBuf,
    old: Option<PathBuf>,
    envoy: PathBuf,
    go_proxy: PathBuf,
    /// Object file of the eBPF programs. The bench needs none of them, but a build without it would be another one.
    object: PathBuf,
    cases: CaseSelection,
    rounds: u32,
}

impl GatewayBenchContext {
    /// Builds the measured program, and provides the other proxies.
    pub(super) fn build(
        args: &BenchArgs,
        cases: &CaseSelection,
        workspace: &CargoWorkspace,
    ) -> Result<Self> {
        let purposes = [SetupPurpose::Build, SetupPurpose::Bench, SetupPurpose::GatewayBench];
        setup::prepare(&purposes, args.yes)?;
        Ok(Self {
            envoy: peers::envoy()?,
            go_proxy: peers::go_proxy(workspace)?,
            rouse: absolute_path(args.rouse_program(workspace)?)?,
            old: args.gateway.old.clone().map(absolute_path).transpose()?,
            object: build_ebpf::build_object(workspace)?,
            cases: cases.clone(),
            rounds: args.rounds,
        })
    }

    /// Names of the cases to measure.
    fn case_names(&self) -> Vec<&'static str> {
        CASES.into_iter().filter(|case| self.cases.contains(case)).collect()
    }
}

/// Absolute path of a file: cargo runs a bench in the folder of its package.
fn absolute_path(file: PathBuf) -> Result<PathBuf> {
    fs::canonicalize(&file).with_context(|| format!("there is no {}", file.display()))
}

/// Runs the bench. It plays the controller by the crates of Rouse, which xtask must not import, so it is a program of
/// its own. It is optimised: the pods in it share a core with the clients.
pub(super) fn run(context: &GatewayBenchContext) -> Result<Vec<BenchRow>> {
    let cases = context.case_names();
    let mut bench = sh::cargo();
    bench.args(["bench", "--quiet", "--package", "tests", "--bench", "gateway", "--"]);
    bench.arg("--rouse").arg(&context.rouse).arg("--envoy").arg(&context.envoy);
    bench.arg("--go-proxy").arg(&context.go_proxy);
    if let Some(old) = &context.old {
        bench.arg("--old").arg(old);
    }
    bench.args(["--cases", &cases.join(","), "--rounds", &context.rounds.to_string()]);
    bench.current_dir(env!("CARGO_MANIFEST_DIR")).env("RUST_LOG", "warn");
    // The object of the measured program: without it cargo would build the agent a second time.
    bench.env(build_ebpf::OBJECT_VARIABLE, &context.object);
    let text = sh::capture(&mut bench)?;
    // Progress goes to standard error; the JSON is the last line.
    let line = text.lines().last().context("the bench printed nothing")?;
    let output: GatewayBenchOutput =
        serde_json::from_str(line).with_context(|| format!("cannot read `{line}`"))?;
    let mut results = CaseResults::new("gateway");
    for case in cases {
        results.add(case, output.rows(case));
    }
    results.finish()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_earlier_program_without_the_bench_is_refused() {
        let old = GatewayBenchArgs { old: Some("rouse".into()) };
        assert!(old.check(true).is_ok());
        assert!(GatewayBenchArgs::default().check(false).is_ok());
        let unnamed = old.check(false).unwrap_err().to_string();
        assert_eq!(unnamed, "--old is for the bench gateway: name it as well");
    }
}
