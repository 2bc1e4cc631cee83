//! Shell: `rouse top`: a live view of services, pods, requests and paths.

use std::{
    io::{self, IsTerminal as _},
    net::SocketAddr,
    time::{Duration, Instant},
};

use controller::model::object::LocalObjectKind;
use local::{layout::NodeLayout, node::NodeManager};
use ratatui::{
    DefaultTerminal, Frame,
    crossterm::event::{self, Event, KeyCode, KeyModifiers},
    layout::{Constraint, Layout as Areas},
    style::{Color, Style, Stylize as _},
    text::Line,
    widgets::{Cell, Row, Table as Widget},
};

use crate::{
    admin_pages, args::TopArgs, command_error::CommandError, stdout, store::NodeStore,
    table::TextTable,
};

mod snapshot;

use snapshot::{ServiceStats, TopSnapshot};

/// Refresh interval of the view.
const REFRESH_INTERVAL: Duration = Duration::from_millis(500);
/// Address of the autoscaler's metrics, inside the node's network namespace.
const AUTOSCALER_ADMIN: SocketAddr =
    SocketAddr::new(std::net::IpAddr::V4(std::net::Ipv4Addr::LOCALHOST), 7102);
/// Timeout of each step of a request for metrics: a stalled autoscaler must not freeze the view.
const METRICS_TIMEOUT: Duration = Duration::from_secs(1);

/// Shows the node until `q`; prints it once with `--once` or without a terminal.
pub(crate) fn top(
    layout: &NodeLayout,
    store: &NodeStore,
    args: &TopArgs,
) -> Result<(), CommandError> {
    if !local::net::is_published(&layout.node_namespace()) {
        return Err(CommandError::NodeDown { node: layout.name().to_owned(), hint: "" });
    }
    NodeManager::enter(layout)
        .map_err(|error| CommandError::Usage(common::link::error_chain(&error)))?;
    let mut before = take_snapshot(store, None)?;
    // Without a terminal the output is a table for a pipe, like that of `rouse get`.
    if args.once || !io::stdout().is_terminal() {
        let rows = before.services.iter().map(|it| it.cells().to_vec()).collect();
        let header = snapshot::COLUMNS.map(str::to_owned).to_vec();
        return Ok(stdout::print_text(&TextTable { header, rows }.to_text())?);
    }
    let mut terminal = ratatui::init();
    let result = run_view(&mut terminal, layout, store, &mut before);
    // Also after an error: the terminal would otherwise stay in raw mode.
    ratatui::restore();
    result
}

/// Draws the view until the user quits.
fn run_view(
    terminal: &mut DefaultTerminal,
    layout: &NodeLayout,
    store: &NodeStore,
    now: &mut TopSnapshot,
) -> Result<(), CommandError> {
    loop {
        terminal.draw(|frame| draw_view(frame, layout.name(), now))?;
        if event::poll(REFRESH_INTERVAL)?
            && let Event::Key(key) = event::read()?
        {
            let control = key.modifiers.contains(KeyModifiers::CONTROL);
            match key.code {
                KeyCode::Char('q') | KeyCode::Esc => return Ok(()),
                KeyCode::Char('c') if control => return Ok(()),
                _ => {}
            }
        }
        // A key press ends the poll early, but rates need a whole interval between two snapshots.
        if now.at.elapsed() >= REFRESH_INTERVAL {
            *now = take_snapshot(store, Some(now))?;
        }
    }
}

/// Takes a snapshot of the node; rates are differences to `before`.
fn take_snapshot(
    store: &NodeStore,
    before: Option<&TopSnapshot>,
) -> Result<TopSnapshot, CommandError> {
    let services = store.objects(LocalObjectKind::Service, None)?;
    let pods = store.objects(LocalObjectKind::Pod, None)?;
    let page = admin_pages::get_page(AUTOSCALER_ADMIN, "/metrics", METRICS_TIMEOUT);
    // Without the autoscaler the objects are still shown, and the error in the last line.
    let metrics = match page {
        Ok(page) if page.status == 200 => Ok(page.body),
        Ok(page) => Err(format!("autoscaler: status {} of its metrics", page.status)),
        Err(error) => Err(format!("autoscaler: {error}")),
    };
    Ok(TopSnapshot::new(Instant::now(), &services, &pods, metrics, before))
}

/// Draws one picture: a line of sums, the services, and a hint or the last error.
fn draw_view(frame: &mut Frame<'_>, node: &str, now: &TopSnapshot) {
    let [head, body, foot] =
        Areas::vertical([Constraint::Length(2), Constraint::Min(1), Constraint::Length(1)])
            .areas(frame.area());
    let awake_count = now.services.iter().filter(|it| it.is_awake()).count();
    let title = format!(
        "node {node}: {} services, {awake_count} awake, {} pods, {} frozen, {:.0} requests/s",
        now.services.len(),
        now.services.iter().map(|it| it.pods).sum::<usize>(),
        now.services.iter().map(|it| it.standby).sum::<usize>(),
        now.services.iter().filter_map(|it| it.rate).sum::<f64>(),
    );
    frame.render_widget(Line::from(title).bold(), head);
    // Only the first column grows: names vary, the other values have a known width.
    let widths = [
        Constraint::Min(20),
        Constraint::Length(8),
        Constraint::Length(6),
        Constraint::Length(8),
        Constraint::Length(7),
        Constraint::Length(10),
        Constraint::Length(8),
        Constraint::Length(11),
        Constraint::Length(10),
    ];
    let names = Row::new(snapshot::COLUMNS).style(Style::new().bold().underlined());
    let table = Widget::new(now.services.iter().map(service_row), widths).header(names);
    frame.render_widget(table, body);
    let hint = now.error.clone().unwrap_or_else(|| "q quits".to_owned());
    frame.render_widget(Line::from(hint).dim(), foot);
}

fn service_row(service: &ServiceStats) -> Row<'static> {
    let colour = match service.path.as_str() {
        "direct" => Color::Green,
        "asleep" => Color::DarkGray,
        "standby" => Color::Blue,
        _ => Color::Yellow,
    };
    Row::new(service.cells().map(Cell::from)).style(Style::new().fg(colour))
}
