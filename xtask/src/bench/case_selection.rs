//! Pure: cases of one bench that a run measures.

use anyhow::{Context as _, Result, bail};

use super::{clusterip, clusterip_cluster, gateway, standby};

/// Benches whose cases can be chosen, with the names of their cases.
const BENCHES_WITH_CASES: [(&str, &[&str]); 4] = [
    ("standby", &standby::CASES),
    ("clusterip", &clusterip::CASES),
    ("clusterip-cluster", &clusterip_cluster::CASES),
    ("gateway", &gateway::CASES),
];

/// Cases that the option `--cases` names; all if it names none.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct CaseSelection(Vec<String>);

impl CaseSelection {
    /// Makes the selection of the chosen benches. Names of cases are those of one bench.
    pub(super) fn new(cases: &[String], benches: &[&str]) -> Result<Self> {
        if cases.is_empty() {
            return Ok(Self::default());
        }
        let [bench] = benches else { bail!("--cases are those of one bench: name that bench") };
        let known = BENCHES_WITH_CASES.iter().find(|(name, _)| name == bench);
        let (_, known) = known.with_context(|| format!("the bench {bench} has no --cases"))?;
        if let Some(name) = cases.iter().find(|name| !known.contains(&name.as_str())) {
            bail!("the bench {bench} has no case `{name}`; it has {}", known.join(", "));
        }
        Ok(Self(cases.to_vec()))
    }

    /// Returns true if the run measures the case.
    pub(super) fn contains(&self, case: &str) -> bool {
        self.0.is_empty() || self.0.iter().any(|it| it == case)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn select(cases: &[&str], benches: &[&str]) -> Result<CaseSelection, String> {
        let cases: Vec<String> = cases.iter().map(ToString::to_string).collect();
        CaseSelection::new(&cases, benches).map_err(|error| error.to_string())
    }

    #[test]
    fn a_run_measures_the_named_cases_or_all() {
        let some = select(&["udp", "upgrade"], &["clusterip"]).unwrap();
        assert_eq!(["flip", "udp", "upgrade"].map(|case| some.contains(case)), [false, true, true]);
        let all = select(&[], &["clusterip", "wake"]).unwrap();
        assert!(all.contains("flip"));
    }

    #[test]
    fn cases_without_their_bench_and_unknown_ones_are_refused() {
        let one_bench = Err("--cases are those of one bench: name that bench".to_owned());
        assert_eq!(select(&["bulk"], &["gateway", "standby"]), one_bench);
        let no_cases = Err("the bench wake has no --cases".to_owned());
        assert_eq!(select(&["bulk"], &["wake"]), no_cases);
        let unknown = select(&["h3_c64"], &["gateway"]).unwrap_err();
        assert!(unknown.starts_with("the bench gateway has no case `h3_c64`; it has h1_c1, "));
    }
}
