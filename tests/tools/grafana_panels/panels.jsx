// Draws panels of our dashboards with Grafana's published components: stat with BigValue, time series with TimeSeries.
// They are Grafana's components and not Grafana: its own panel plugins, which lay out a dashboard, are in no package.
// The page puts [{panel, frames}] into window.drawn(...), with queries answered and variables filled in.
import { useState } from 'react';
import { createRoot } from 'react-dom/client';
import {
  Registry, ThemeContext, applyFieldOverrides, createTheme, dateTime, getDisplayProcessor, toDataFrame,
} from '@grafana/data';
import { BigValue, PanelChrome, TimeSeries } from '@grafana/ui';

const COLUMN = 60; // a window of 1440 pixels
const STANDARD = ['unit', 'decimals', 'min', 'max', 'noValue', 'mappings', 'thresholds', 'color', 'links', 'displayName'];

function registry({ defaults, overrides }) {
  const custom = Object.keys(defaults.custom ?? {}).map((name) => `custom.${name}`);
  const ids = new Set([...STANDARD, ...custom, ...overrides.flatMap((one) => one.properties.map(({ id }) => id))]);
  return new Registry(() => [...ids].map((id) => ({
    id, name: id, path: id.replace(/^custom\./, ''), isCustom: id.startsWith('custom.'),
    process: (value) => value, shouldApply: () => true, getItemsCount: () => 0,
  })));
}

function frames({ panel, frames }, theme) {
  const fieldConfig = { defaults: {}, overrides: [], ...panel.fieldConfig };
  return applyFieldOverrides({
    data: frames.map(({ refId, name, labels, times, values }) => toDataFrame({
      refId, name,
      fields: [
        { name: 'Time', type: 'time', values: times, config: {} },
        { name: 'Value', type: 'number', labels, values, config: name ? { displayNameFromDS: name } : {} },
      ],
    })),
    fieldConfig, fieldConfigRegistry: registry(fieldConfig), replaceVariables: (text) => text, theme, timeZone: 'utc',
  });
}

function Stat({ panel, data, width, height, theme }) {
  const field = data[0]?.fields[1];
  const process = field?.display ?? getDisplayProcessor({ field: { type: 'number', config: panel.fieldConfig.defaults }, theme });
  const value = field ? process(field.values.at(-1)) : { text: panel.fieldConfig.defaults.noValue, numeric: NaN, color: 'gray' };
  const { colorMode, graphMode, justifyMode, textMode } = panel.options;
  const title = field?.config.displayNameFromDS;
  return <BigValue {...{ width, height, theme, colorMode, graphMode, justifyMode, textMode }} value={{ ...value, title }} />;
}

function Panel({ one, from, to, theme }) {
  const { panel } = one;
  const [data] = useState(() => frames(one, theme));
  const stat = panel.type === 'stat';
  const width = COLUMN * panel.gridPos.w - 8;
  const height = 34 * panel.gridPos.h;
  return (
    <div id={`panel-${panel.id}`} style={{ width, height, display: 'inline-block', margin: 4, verticalAlign: 'top' }}>
      <PanelChrome title={one.title} width={width} height={height}>
        {(w, h) => stat ? <Stat panel={panel} data={data} width={w} height={h} theme={theme} /> : (
          <TimeSeries frames={data} width={w} height={h} timeZone="utc" legend={panel.options.legend}
            timeRange={{ from: dateTime(from), to: dateTime(to), raw: { from: dateTime(from), to: dateTime(to) } }} />
        )}
      </PanelChrome>
    </div>
  );
}

window.drawn = (panels, from, to) => {
  const theme = createTheme({ colors: { mode: 'light' } });
  document.body.style.background = theme.colors.background.canvas;
  document.body.style.fontFamily = theme.typography.fontFamily;
  document.body.style.fontSize = '14px';
  createRoot(document.getElementById('panels')).render(
    <ThemeContext.Provider value={theme}>
      {panels.map((one) => <Panel key={one.panel.id} one={one} from={from} to={to} theme={theme} />)}
    </ThemeContext.Provider>,
  );
};
