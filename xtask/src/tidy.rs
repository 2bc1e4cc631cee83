//! Shell: reads the source tree and prints violations of the layout rules.

mod commit_subjects;
mod glossary;
mod layers;
mod metrics;
mod rules;
mod words;

use std::{
    fs,
    path::{Path, PathBuf},
    process::Command,
};

use anyhow::{Context as _, Result, bail};

use self::{
    glossary::Glossary,
    layers::ModuleLayers,
    metrics::ExportedMetrics,
    rules::{FindingSeverity, SourceFile, TidyFinding},
    words::WordFigures,
};
use crate::{sh, workspace::CargoWorkspace};

/// Path of the rules that Prometheus evaluates.
pub(crate) const PROMETHEUS_RULES: &str = "deploy/monitoring/rules.yaml";
/// Path of the dashboard that Grafana shows.
pub(crate) const GRAFANA_DASHBOARD: &str = "deploy/monitoring/dashboard.json";
/// The last commit whose subject was written before the rule for subjects.
const LAST_UNCHECKED_COMMIT: &str = "192e42eee57c";
/// Crates that name metrics without exporting any.
const CRATES_WITHOUT_METRICS: [&str; 3] = ["xtask", "tests", "hello"];

/// Runs `cargo xtask tidy`: checks the sources of the workspace's packages, and the documents at the root and in
/// `docs/`. The folder `fuzz/`, a workspace of its own, and documents elsewhere are not read.
pub(crate) fn run() -> Result<()> {
    let workspace = CargoWorkspace::load()?;
    let mut findings = check_crate_imports(&workspace);
    let mut exported = ExportedMetrics::default();
    let mut words = WordFigures::default();
    let mut layers = ModuleLayers::default();
    let page = read(&workspace.root.join(glossary::GLOSSARY))?;
    let (mut glossary, malformed_rows) = Glossary::parse(&page);
    findings.extend(malformed_rows);
    for package in &workspace.packages {
        for file in rust_files(&package.folder(), &workspace)? {
            let text = read(&file)?;
            let path = relative(&file, &workspace.root);
            let source = SourceFile { krate: &package.name, path: &path, text: &text };
            findings.extend(rules::check_source(&source));
            findings.extend(words.check_file(&source));
            findings.extend(layers.add_file(&source));
            findings.extend(glossary.check_file(&source));
            if !CRATES_WITHOUT_METRICS.contains(&package.name.as_str()) {
                exported.add_file(&path, &text);
            }
        }
    }
    for file in documents(&workspace.root)? {
        let path = relative(&file, &workspace.root);
        let text = read(&file)?;
        // `check_document` passes paths from the root, also for links that start at the document's directory.
        let exists = |name: &str| workspace.root.join(name).exists();
        findings.extend(rules::check_document(&path, &text, exists));
        findings.extend(metrics::check_document(&path, &text, &exported));
    }
    findings.extend(check_metric_names(&workspace.root, &exported)?);
    findings.extend(words.check_totals());
    findings.extend(layers.check());
    findings.extend(glossary.check_definitions());
    let errors =
        findings.iter().filter(|finding| finding.severity == FindingSeverity::Error).count();
    for finding in &findings {
        println!("{finding}");
    }
    println!("{layers}");
    println!("tidy: {words}");
    println!("tidy: {errors} errors, {} warnings", findings.len() - errors);
    if errors > 0 {
        bail!("the tree breaks {errors} rules listed above");
    }
    Ok(())
}

/// Checks the subjects of all commits since the rule for them began.
pub(crate) fn check_commit_subjects() -> Result<()> {
    let workspace = CargoWorkspace::load()?;
    let crates: Vec<&str> = workspace.packages.iter().map(|it| it.name.as_str()).collect();
    let log = |range: &str| {
        let args = ["log", "--no-merges", "--format=%h %s", range];
        sh::capture(Command::new("git").args(args).current_dir(&workspace.root))
    };
    // A clone without history has the last commit only.
    let lines = log(&format!("{LAST_UNCHECKED_COMMIT}..HEAD")).or_else(|_| log("-1"))?;
    let commits = lines.lines().filter_map(|line| line.split_once(' '));
    let findings: Vec<TidyFinding> = commits
        .filter_map(|(hash, subject)| commit_subjects::check(hash, subject, &crates))
        .collect();
    findings.iter().for_each(|finding| println!("{finding}"));
    if !findings.is_empty() {
        bail!("{} commits have a subject that breaks the rule", findings.len());
    }
    Ok(())
}

/// Checks the metrics in the handbook, in the rules and in the dashboard.
fn check_metric_names(root: &Path, exported: &ExportedMetrics) -> Result<Vec<TidyFinding>> {
    let handbook = read(&root.join(metrics::HANDBOOK))?;
    let mut findings = metrics::check_handbook(&handbook, exported);
    let rules = read(&root.join(PROMETHEUS_RULES))?;
    let recorded = metrics::recorded_names(&rules);
    findings.extend(metrics::check_queries(PROMETHEUS_RULES, &rules, &handbook, &recorded));
    let dashboard = read(&root.join(GRAFANA_DASHBOARD))?;
    findings.extend(metrics::check_queries(GRAFANA_DASHBOARD, &dashboard, &handbook, &recorded));
    Ok(findings)
}

fn check_crate_imports(workspace: &CargoWorkspace) -> Vec<TidyFinding> {
    let mut findings = Vec::new();
    for package in &workspace.packages {
        let workspace_dependencies =
            package.dependencies.iter().filter(|dependency| dependency.path.is_some());
        for dependency in workspace_dependencies {
            findings.extend(rules::check_import(&package.name, &dependency.name));
        }
    }
    findings
}

/// All `.rs` files below `folder`, without those of nested packages.
fn rust_files(folder: &Path, workspace: &CargoWorkspace) -> Result<Vec<PathBuf>> {
    let nested: Vec<PathBuf> = workspace.packages.iter().map(|other| other.folder()).collect();
    let mut files = Vec::new();
    let mut folders = vec![folder.to_owned()];
    while let Some(folder) = folders.pop() {
        let entries =
            fs::read_dir(&folder).with_context(|| format!("cannot list {}", folder.display()))?;
        for entry in entries {
            let path = entry?.path();
            // A nested package is visited on its own, under its own name.
            let skip = nested.contains(&path) || path == workspace.target;
            if path.is_dir() && !skip {
                folders.push(path);
            } else if path.extension().is_some_and(|extension| extension == "rs") {
                files.push(path);
            }
        }
    }
    files.sort();
    Ok(files)
}

/// Paths of the documents at the root and in `docs/`.
fn documents(root: &Path) -> Result<Vec<PathBuf>> {
    let mut files = Vec::new();
    for folder in [root.to_owned(), root.join("docs")] {
        let Ok(entries) = fs::read_dir(&folder) else { continue };
        for entry in entries {
            let path = entry?.path();
            if path.extension().is_some_and(|extension| extension == "md") {
                files.push(path);
            }
        }
    }
    files.sort();
    Ok(files)
}

fn read(file: &Path) -> Result<String> {
    fs::read_to_string(file).with_context(|| format!("cannot read {}", file.display()))
}

fn relative(file: &Path, root: &Path) -> String {
    file.strip_prefix(root).unwrap_or(file).display().to_string()
}
