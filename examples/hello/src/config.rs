//! Pure: the environment as one checked struct.

use std::{
    net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr},
    path::PathBuf,
    time::Duration,
};

/// Behaviour of this process, read from its environment.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct HelloConfig {
    /// Name in responses: `HOSTNAME`, else `K_REVISION`, else `hello`.
    pub(crate) pod: String,
    /// `PORT`: the port to listen on, 8080 by default.
    pub(crate) port: u16,
    /// `HELLO_LISTEN`: `any` (default), `any4`, `loopback`, `loopback6` or `never`.
    pub(crate) listen: ListenAddress,
    /// `HELLO_LISTEN_DELAY_MS`: milliseconds to wait before listening.
    pub(crate) listen_delay: Duration,
    /// `HELLO_EXIT`: exit at once with this code.
    pub(crate) exit_at_start: Option<u8>,
    /// `HELLO_EXIT_AFTER_MS`: exit with code 1 this many milliseconds after the start.
    pub(crate) exit_after: Option<Duration>,
    /// `HELLO_READY_AFTER_MS`: time for which `/ready` responds with 503, 0 by default; `None` for `never`: forever.
    pub(crate) ready_after: Option<Duration>,
    /// `HELLO_IGNORE_TERM=1`: continue in spite of SIGTERM.
    pub(crate) ignore_term: bool,
    /// `HELLO_WRITE=FILE:TEXT`: write this file first, as an init container does.
    pub(crate) write: Option<(PathBuf, String)>,
    /// `HELLO_FILES`: folder whose files `/files/NAME` returns; none by default.
    pub(crate) files: Option<PathBuf>,
    /// `HELLO_EXIT_ON_TERM=1`: exit at once on SIGTERM, even with requests in flight.
    pub(crate) exit_on_term: bool,
    /// `HELLO_IDS`: folder of a file, named after the pod, to which the `id` of each request is appended as it begins.
    pub(crate) ids: Option<PathBuf>,
    /// `HELLO_ECHO_PORT`: port of the [`echo`](crate::echo); none by default. On `PORT`, the echo takes the place of
    /// HTTP.
    pub(crate) echo_port: Option<u16>,
}

/// Addresses on which the server listens.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum ListenAddress {
    /// Every address of both families.
    Any,
    /// Every IPv4 address, no IPv6.
    Any4,
    /// Address 127.0.0.1 only, as many development servers do.
    Loopback,
    /// Address ::1 only, the IPv6 loopback.
    Loopback6,
    /// No address at all: the server never listens.
    Never,
}

impl HelloConfig {
    /// Reads the variables through `get`, so that tests need no process environment.
    pub(crate) fn from_lookup(get: impl Fn(&str) -> Option<String>) -> Result<Self, String> {
        // Manifests often set a variable to "" to clear it, so an empty one counts as unset.
        let get = |name: &str| get(name).filter(|value| !value.is_empty());
        let flag = |name: &str| get(name).is_some_and(|value| value != "0");
        let millis =
            |name: &str| parse_variable(name, get(name)).map(|ms| ms.map(Duration::from_millis));
        // `never` is no number, so it is tested before the number is parsed.
        let ready_after = match get("HELLO_READY_AFTER_MS").as_deref() {
            Some("never") => None,
            _ => Some(millis("HELLO_READY_AFTER_MS")?.unwrap_or_default()),
        };
        Ok(Self {
            pod: get("HOSTNAME").or_else(|| get("K_REVISION")).unwrap_or_else(|| "hello".into()),
            port: parse_variable("PORT", get("PORT"))?.unwrap_or(8080),
            listen: ListenAddress::parse(get("HELLO_LISTEN").as_deref())?,
            listen_delay: millis("HELLO_LISTEN_DELAY_MS")?.unwrap_or_default(),
            exit_at_start: parse_variable("HELLO_EXIT", get("HELLO_EXIT"))?,
            exit_after: millis("HELLO_EXIT_AFTER_MS")?,
            ready_after,
            write: get("HELLO_WRITE").map(|text| split_file_and_text(&text)).transpose()?,
            files: get("HELLO_FILES").map(PathBuf::from),
            ignore_term: flag("HELLO_IGNORE_TERM"),
            exit_on_term: flag("HELLO_EXIT_ON_TERM"),
            ids: get("HELLO_IDS").map(PathBuf::from),
            echo_port: parse_variable("HELLO_ECHO_PORT", get("HELLO_ECHO_PORT"))?,
        })
    }

    /// Port of HTTP; `None` if the echo has it.
    pub(crate) fn http_port(&self) -> Option<u16> {
        Some(self.port).filter(|port| self.echo_port != Some(*port))
    }
}

fn split_file_and_text(both: &str) -> Result<(PathBuf, String), String> {
    let (file, text) =
        both.split_once(':').ok_or_else(|| format!("HELLO_WRITE={both}: must be FILE:TEXT"))?;
    Ok((file.into(), text.to_owned()))
}

impl ListenAddress {
    fn parse(text: Option<&str>) -> Result<Self, String> {
        match text {
            None | Some("any") => Ok(Self::Any),
            Some("any4") => Ok(Self::Any4),
            Some("loopback") => Ok(Self::Loopback),
            Some("loopback6") => Ok(Self::Loopback6),
            Some("never") => Ok(Self::Never),
            Some(other) => Err(format!(
                "HELLO_LISTEN={other}: must be any, any4, loopback, loopback6 or never"
            )),
        }
    }

    /// The address to bind, or `None` to listen nowhere.
    pub(crate) fn address(self, port: u16) -> Option<SocketAddr> {
        let ip: IpAddr = match self {
            Self::Any => Ipv6Addr::UNSPECIFIED.into(),
            Self::Any4 => Ipv4Addr::UNSPECIFIED.into(),
            Self::Loopback => Ipv4Addr::LOCALHOST.into(),
            Self::Loopback6 => Ipv6Addr::LOCALHOST.into(),
            Self::Never => return None,
        };
        Some(SocketAddr::new(ip, port))
    }
}

fn parse_variable<T: std::str::FromStr>(
    name: &str,
    text: Option<String>,
) -> Result<Option<T>, String> {
    let Some(text) = text else { return Ok(None) };
    match text.parse() {
        Ok(value) => Ok(Some(value)),
        Err(_) => Err(format!("{name}={text}: must be a number that fits its range")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn config(pairs: &[(&str, &str)]) -> Result<HelloConfig, String> {
        HelloConfig::from_lookup(|name| {
            pairs.iter().find(|(key, _)| *key == name).map(|(_, value)| (*value).to_owned())
        })
    }

    #[test]
    fn an_empty_environment_gives_a_well_behaved_server() {
        let expected = HelloConfig {
            pod: "hello".into(),
            port: 8080,
            listen: ListenAddress::Any,
            listen_delay: Duration::ZERO,
            exit_at_start: None,
            exit_after: None,
            ready_after: Some(Duration::ZERO),
            ignore_term: false,
            write: None,
            files: None,
            exit_on_term: false,
            ids: None,
            echo_port: None,
        };
        assert_eq!(config(&[]), Ok(expected));
    }

    #[test]
    fn the_echo_takes_the_place_of_http_on_its_port_alone() {
        let ports = |pairs: &[(&str, &str)]| config(pairs).map(|it| (it.http_port(), it.echo_port));
        assert_eq!(ports(&[]), Ok((Some(8080), None)));
        assert_eq!(ports(&[("HELLO_ECHO_PORT", "5432")]), Ok((Some(8080), Some(5432))));
        assert_eq!(ports(&[("HELLO_ECHO_PORT", "8080")]), Ok((None, Some(8080))));
    }

    #[test]
    fn a_bad_value_is_named_with_what_is_allowed() {
        assert_eq!(
            config(&[("HELLO_LISTEN", "maybe")]),
            Err("HELLO_LISTEN=maybe: must be any, any4, loopback, loopback6 or never".into())
        );
        assert_eq!(
            config(&[("PORT", "99999")]),
            Err("PORT=99999: must be a number that fits its range".into())
        );
    }

    #[test]
    fn never_ready_is_not_ready_at_once() {
        let never = config(&[("HELLO_READY_AFTER_MS", "never")]).unwrap();
        assert_eq!(never.ready_after, None);
    }
}
