//! Shell: reads the source tree and prints violations of the layout rules.

mod metrics;
mod rules;
mod words;

use std::{
    fs,
    path::{Path, PathBuf},
};

use anyhow::{Context as _, Result, bail};

use self::{
    metrics::Exported,
    rules::{Finding, Severity, Source},
    words::Words,
};
use crate::workspace::Workspace;

/// Path of the rules that Prometheus evaluates.
pub(crate) const RULES: &str = "deploy/monitoring/rules.yaml";
/// Path of the dashboard that Grafana shows.
pub(crate) const DASHBOARD: &str = "deploy/monitoring/dashboard.json";
/// Crates that name metrics without exporting any.
const OUTSIDE: [&str; 3] = ["xtask", "tests", "hello"];

/// Runs `cargo xtask tidy`: checks all sources and documents.
pub(crate) fn run() -> Result<()> {
    let workspace = Workspace::load()?;
    let mut findings = arrows(&workspace);
    let mut exported = Exported::default();
    let mut words = Words::default();
    for package in &workspace.packages {
        for file in rust_files(&package.folder(), &workspace)? {
            let text = read(&file)?;
            let path = relative(&file, &workspace.root);
            let source = Source { krate: &package.name, path: &path, text: &text };
            findings.extend(rules::source(&source));
            findings.extend(words.read(&source));
            if !OUTSIDE.contains(&package.name.as_str()) {
                exported.read(&path, &text);
            }
        }
    }
    for file in documents(&workspace.root)? {
        let path = relative(&file, &workspace.root);
        let text = read(&file)?;
        // Documents name files by paths from the root or from their own directory.
        let exists = |name: &str| workspace.root.join(name).exists();
        findings.extend(rules::document(&path, &text, exists));
        findings.extend(metrics::document(&path, &text, &exported));
    }
    findings.extend(monitoring(&workspace.root, &exported)?);
    findings.extend(words.judge());
    let errors = findings.iter().filter(|finding| finding.severity == Severity::Error).count();
    for finding in &findings {
        println!("{finding}");
    }
    println!("tidy: {words}");
    println!("tidy: {errors} errors, {} warnings", findings.len() - errors);
    if errors > 0 {
        bail!("the tree breaks {errors} rules listed above");
    }
    Ok(())
}

/// Checks the metrics in the handbook, in the rules and in the dashboard.
fn monitoring(root: &Path, exported: &Exported) -> Result<Vec<Finding>> {
    let handbook = read(&root.join(metrics::HANDBOOK))?;
    let mut findings = metrics::handbook(&handbook, exported);
    let rules = read(&root.join(RULES))?;
    let recorded = metrics::recorded(&rules);
    findings.extend(metrics::queries(RULES, &rules, &handbook, &recorded));
    let dashboard = read(&root.join(DASHBOARD))?;
    findings.extend(metrics::queries(DASHBOARD, &dashboard, &handbook, &recorded));
    Ok(findings)
}

fn arrows(workspace: &Workspace) -> Vec<Finding> {
    let mut findings = Vec::new();
    for package in &workspace.packages {
        let ours = package.dependencies.iter().filter(|dependency| dependency.path.is_some());
        for dependency in ours {
            findings.extend(rules::arrow(&package.name, &dependency.name));
        }
    }
    findings
}

/// All `.rs` files below `folder`, without those of nested packages.
fn rust_files(folder: &Path, workspace: &Workspace) -> Result<Vec<PathBuf>> {
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

/// Paths of the documents at the root and below `docs/`.
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
