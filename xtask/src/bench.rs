//! Shell: measures Rouse beside its controls, in interleaved rounds, and writes BENCHMARKS.md.

mod bpf;
mod connect;
mod control_plane;
mod idle;
mod report;
mod scene;
mod stats;
mod wake;
mod warm;

use std::{fs, path::PathBuf};

use anyhow::{Context as _, Result, bail};

use self::{
    report::{Report, Row},
    scene::Scene,
    stats::Rounds,
};
use crate::{
    build, image,
    machine::Machine,
    setup::{self, Purpose},
    sh,
    workspace::Workspace,
};

/// What to measure.
#[derive(Clone, Debug, clap::Args)]
pub(crate) struct Args {
    /// Benches to run; all when none is named: wake, connect, warm, idle, control-plane
    names: Vec<String>,
    /// Rounds of each comparison
    #[arg(long, default_value_t = 15, value_parser = clap::value_parser!(u32).range(1..))]
    rounds: u32,
    /// Write the figures to FILE as JSON, one array element a bench
    #[arg(long, value_name = "FILE")]
    json: Option<PathBuf>,
    /// Install what is missing without asking
    #[arg(long)]
    yes: bool,
    /// Leave BENCHMARKS.md as it is
    #[arg(long)]
    dry: bool,
    /// Measure this program instead of building one
    #[arg(long, value_name = "FILE")]
    rouse: Option<PathBuf>,
}

/// A bench's name and what gives its rows.
type Bench = (&'static str, fn(&Scene) -> Result<Vec<Row>>);

const BENCHES: [Bench; 5] = [
    ("wake", wake::run),
    ("connect", connect::run),
    ("warm", warm::run),
    ("idle", idle::run),
    ("control-plane", control_plane::run),
];

/// `cargo xtask bench`.
pub(crate) fn run(args: &Args) -> Result<()> {
    let workspace = Workspace::load()?;
    let benches = chosen(&args.names)?;
    if !sh::is_root() {
        bail!(
            "the benches read the kernel's statistics: run them as root, for example with sudo -E"
        );
    }
    setup::prepare(&[Purpose::Build, Purpose::Node, Purpose::Bench], args.yes)?;
    let rouse = match &args.rouse {
        Some(rouse) => rouse.clone(),
        None => build::rouse(&workspace, true)?,
    };
    let images = workspace.target.join("images");
    image::make(&workspace, &["hello"], &images)?;
    let folder = workspace.target.join("bench");
    fs::create_dir_all(&folder).with_context(|| format!("cannot make {}", folder.display()))?;
    let client = build::client(&workspace)?;
    let hello = image::program(&workspace, "hello");
    let scene = Scene { rouse, images, client, hello, folder: folder.clone(), rounds: args.rounds };

    let (mut reports, mut failed) = (Vec::new(), Vec::new());
    for (name, body) in benches {
        println!("\n== {name} ==");
        match body(&scene) {
            Ok(rows) => {
                let report = Report { name: name.to_owned(), machine: Machine::read(), rows };
                println!("{}", report::section(&report));
                fs::write(folder.join(format!("{name}.json")), json(&report)?)?;
                reports.push(report);
            }
            Err(error) => {
                eprintln!("{name}: {error:#}");
                failed.push(name);
            }
        }
    }
    publish(args, &workspace, &reports)?;
    if !failed.is_empty() {
        bail!("not measured: {}", failed.join(", "));
    }
    Ok(())
}

fn chosen(names: &[String]) -> Result<Vec<Bench>> {
    if names.is_empty() {
        return Ok(BENCHES.to_vec());
    }
    let find = |name: &String| {
        BENCHES.iter().find(|(known, _)| known == name).copied().with_context(|| {
            let known: Vec<&str> = BENCHES.iter().map(|(name, _)| *name).collect();
            format!("there is no bench `{name}`; there are {}", known.join(", "))
        })
    };
    names.iter().map(find).collect()
}

fn publish(args: &Args, workspace: &Workspace, reports: &[Report]) -> Result<()> {
    if let Some(file) = &args.json {
        fs::write(file, json(&reports)?)
            .with_context(|| format!("cannot write {}", file.display()))?;
    }
    if args.dry || reports.is_empty() {
        return Ok(());
    }
    let file = workspace.root.join("BENCHMARKS.md");
    let mut document = fs::read_to_string(&file).unwrap_or_else(|_| "# Benchmarks\n".into());
    for report in reports {
        let section = report::section(report);
        document = report::replace_section(&document, &report.name, &section);
    }
    fs::write(&file, document).with_context(|| format!("cannot write {}", file.display()))
}

fn json(value: &impl serde::Serialize) -> Result<String> {
    Ok(serde_json::to_string_pretty(value)? + "\n")
}

/// Measures every subject once a round, the first of a round changing from round to round.
///
/// A round before the first warms caches and is thrown away.
fn interleave(
    rounds: u32,
    subjects: &[&'static str],
    mut measure: impl FnMut(&'static str) -> Result<f64>,
) -> Result<Rounds> {
    let mut values = Rounds::new();
    for round in 0..=rounds as usize {
        for place in 0..subjects.len() {
            let subject = subjects[(place + round) % subjects.len()];
            let value = measure(subject).with_context(|| format!("subject {subject}"))?;
            if round > 0 {
                values.entry(subject).or_default().push(value);
            }
        }
    }
    Ok(values)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rounds_rotate_who_comes_first_and_drop_the_first_round() {
        let mut order = Vec::new();
        let mut next = 0.0;
        let rounds = interleave(2, &["a", "b"], |subject| {
            order.push(subject);
            next += 1.0;
            Ok(next)
        });
        assert_eq!(order, ["a", "b", "b", "a", "a", "b"]);
        let want = Rounds::from([("a", vec![4.0, 5.0]), ("b", vec![3.0, 6.0])]);
        assert_eq!(rounds.unwrap(), want);
    }

    #[test]
    fn a_bench_that_does_not_exist_is_refused_with_those_that_do() {
        let error = chosen(&["wakes".into()]).unwrap_err().to_string();
        assert_eq!(
            error,
            "there is no bench `wakes`; there are wake, connect, warm, idle, control-plane"
        );
    }
}
