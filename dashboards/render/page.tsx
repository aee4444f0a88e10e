/** Draws a dashboard with Grafana's components, outside Grafana, from what `tests/grafana.py` asked of the data sources. */

import {
  applyFieldOverrides, createTheme, dateTime, FieldType, getDisplayValueAlignmentFactors, getFieldDisplayValues,
  getValueFormatterIndex,
  renderMarkdown, ThemeContext, toDataFrame, VizOrientation,
  type ActionModel, type DataFrame, type FieldDisplay, type GrafanaTheme2, type TimeRange,
} from '@grafana/data';
import {
  BigValue, GlobalStyles, Icon, InlineLabel, PanelChrome, PanelContextProvider, TimeSeries, VizRepeater,
  type UPlotConfigBuilder, type VizRepeaterRenderValueProps,
} from '@grafana/ui';
import { TableNG } from '@grafana/ui/unstable';
import { EventBusSrv } from '@grafana/data';
import { useLayoutEffect } from 'react';
import { createRoot } from 'react-dom/client';
import { completed, registry, type Kind } from './defaults';

interface Series { legend: string; labels: Record<string, string>; times: number[]; values: number[] }
interface Column { name: string; type: 'string' | 'number' | 'boolean' | 'timestamp'; values: unknown[] }
interface Mark { from: number; to: number; color: string; name: string }
interface Shown {
  dashboard: any;
  from: number;
  to: number;
  step: number;
  width: number;
  variables: Array<[string, string]>;
  data: Record<string, { series?: Series[]; columns?: Column[] }>;
  marks: Mark[];
}

const CELL = 30, GAP = 8;  // Grafana's grid: heights of a cell and of what is between two, in pixels
const UTC = 'utc';
const theme: GrafanaTheme2 = createTheme({ colors: { mode: 'dark' } });

/** A column of a table as a field, as the Infinity data source makes it. */
function column({ name, type, values }: Column) {
  return type === 'timestamp'
    ? { name, type: FieldType.time, values: values.map((value) => Date.parse(String(value))) }
    : { name, type: type as FieldType, values };
}

/** What a data source's answer is as frames. */
function frames(shown: Shown, panel: any): DataFrame[] {
  const answer = shown.data[panel.id] ?? {};
  if (answer.columns) {
    return [toDataFrame({ fields: answer.columns.map(column) })];
  }
  return (answer.series ?? []).map((series) =>
    toDataFrame({
      fields: [
        { name: 'Time', type: FieldType.time, values: series.times, config: { interval: shown.step } },
        {
          name: 'Value',
          type: FieldType.number,
          values: series.values,
          labels: series.labels,
          config: { displayNameFromDS: series.legend },
        },
      ],
    })
  );
}

/** Where something happened, as Grafana draws annotations: a region between two dashed lines, and a bar below it. */
function Marks({ config, marks }: { config: UPlotConfigBuilder; marks: Mark[] }): null {
  useLayoutEffect(() => {
    config.addHook('draw', (plot) => {
      const { ctx, bbox } = plot;
      const bottom = bbox.top + bbox.height;
      ctx.save();
      ctx.lineWidth = 2;
      for (const mark of marks) {
        const [left, right] = [mark.from, mark.to].map((time) => Math.round(plot.valToPos(time, 'x', true)));
        ctx.strokeStyle = ctx.fillStyle = theme.visualization.getColorByName(mark.color);
        ctx.setLineDash([5, 5]);
        for (const x of [left, right]) {
          ctx.beginPath();
          ctx.moveTo(x, bbox.top);
          ctx.lineTo(x, bottom);
          ctx.stroke();
        }
        ctx.fillRect(left, bottom, Math.max(right - left, 2), 5);
        ctx.globalAlpha = 0.1;
        ctx.fillRect(left, bbox.top, right - left, bbox.height);
        ctx.globalAlpha = 1;
      }
      ctx.restore();
    });
  }, [config, marks]);
  return null;
}

function Stat({ panel, data, width, height, kind }: any) {
  const values = () =>
    getFieldDisplayValues({
      data,
      fieldConfig: completed(kind, panel.fieldConfig),
      reduceOptions: panel.options.reduceOptions,
      replaceVariables: (text) => text,
      sparkline: panel.options.graphMode !== 'none',
      theme,
      timeZone: UTC,
    });
  const one = ({ value, width, height, count, alignmentFactors }: VizRepeaterRenderValueProps<FieldDisplay, any>) => (
    <BigValue
      value={value.display}
      sparkline={value.sparkline}
      count={count}
      alignmentFactors={alignmentFactors}
      width={width}
      height={height}
      theme={theme}
      colorMode={panel.options.colorMode}
      graphMode={panel.options.graphMode}
      justifyMode={panel.options.justifyMode}
      textMode={panel.options.textMode}
    />
  );
  return (
    <VizRepeater
      getValues={values}
      getAlignmentFactors={getDisplayValueAlignmentFactors}
      renderValue={one}
      width={width}
      height={height}
      source={data}
      renderCounter={0}
      autoGrid
      orientation={VizOrientation.Auto}
    />
  );
}

function actions(frame: DataFrame, field: any): ActionModel[] {
  return (field.config.actions ?? []).map((action: any) => ({
    title: action.title, onClick: () => undefined, confirmation: () => action.confirmation, style: {}, variables: [],
  }));
}

function Body({ shown, panel, width, height }: { shown: Shown; panel: any; width: number; height: number }) {
  if (panel.type === 'text') {
    const html = renderMarkdown(panel.options.content);
    return <div className="markdown-html" style={{ padding: 4 }} dangerouslySetInnerHTML={{ __html: html }} />;
  }
  const kind = panel.type as Kind;
  const data = applyFieldOverrides({
    data: frames(shown, panel),
    fieldConfig: completed(kind, panel.fieldConfig),
    fieldConfigRegistry: registry(kind),
    replaceVariables: (text) => text,
    theme,
    timeZone: UTC,
  });
  if (!data.some((frame) => frame.length)) {
    return <div className="no-data">{panel.fieldConfig.defaults.noValue ?? 'No data'}</div>;
  }
  if (kind === 'stat') {
    return <Stat panel={panel} data={data} width={width} height={height} kind={kind} />;
  }
  if (kind === 'table') {
    return (
      <TableNG
        data={data[0]} width={width} height={height} cellHeight={panel.options.cellHeight} getActions={actions}
        enableVirtualization={false}
      />
    );
  }
  const range = { from: dateTime(shown.from), to: dateTime(shown.to) };
  return (
    <TimeSeries
      frames={data} width={width} height={height} timeZone={UTC} legend={panel.options.legend} options={panel.options}
      timeRange={{ ...range, raw: range } as TimeRange}
    >
      {(config) => <Marks config={config} marks={shown.marks} />}
    </TimeSeries>
  );
}

function Panel({ shown, panel }: { shown: Shown; panel: any }) {
  const column = (shown.width - 2 * GAP + GAP) / 24;
  const { x, y, w, h } = panel.gridPos;
  const place = { left: x * column, top: y * (CELL + GAP), width: w * column - GAP, height: h * (CELL + GAP) - GAP };
  if (panel.type === 'row') {
    return (
      <div className="heading" style={{ position: 'absolute', ...place }}>
        <Icon name="angle-down" /> {panel.title}
      </div>
    );
  }
  const padding = panel.type === 'table' ? 'none' : 'md';
  return (
    <div className="panel" data-title={panel.title} style={{ position: 'absolute', ...place }}>
      <PanelChrome
        title={panel.title} description={panel.description} width={place.width} height={place.height} padding={padding}
      >
        {(width, height) => <Body shown={shown} panel={panel} width={width} height={height} />}
      </PanelChrome>
    </div>
  );
}

function Head({ shown }: { shown: Shown }) {
  const events = shown.dashboard.annotations.list.filter((one: any) => one.enable && !one.builtIn);
  return (
    <div className="head">
      <div className="name">
        <h1>{shown.dashboard.title}</h1>
        <span>{events.map((one: any) => (
          <span key={one.name} className="event"><i style={{ background: theme.visualization.getColorByName(one.iconColor) }} />{one.name}</span>
        ))}</span>
      </div>
      <div className="variables">
        {shown.variables.map(([label, value]) => (
          <span key={label} className="variable"><InlineLabel width="auto">{label}</InlineLabel><b>{value}</b></span>
        ))}
      </div>
    </div>
  );
}

const STYLE = `
  html, body { height: auto !important; overflow: visible !important; }
  body { background: ${theme.colors.background.canvas}; margin: 0; }
  .head { padding: 0 0 ${GAP}px }
  .head .name { display: flex; align-items: baseline; justify-content: space-between }
  .head h1 { font-size: 22px; margin: 4px 0 8px }
  .event { margin-left: 20px; color: ${theme.colors.text.secondary}; font-size: 12px }
  .event i { display: inline-block; width: 10px; height: 10px; border-radius: 5px; margin-right: 6px }
  .variables { display: flex; flex-wrap: wrap; gap: ${GAP}px }
  .variable { display: flex }
  .variable b { border: 1px solid ${theme.colors.border.medium}; background: ${theme.colors.background.primary};
    padding: 0 10px; line-height: 30px; font-weight: 400; font-size: 13px }
  .heading { display: flex; align-items: center; gap: 6px; font-size: 18px; font-weight: 500 }
  .no-data { display: flex; height: 100%; align-items: center; justify-content: center;
    color: ${theme.colors.text.secondary} }
`;

function Page({ shown }: { shown: Shown }) {
  const bottom = Math.max(...shown.dashboard.panels.map((panel: any) => panel.gridPos.y + panel.gridPos.h));
  const context = {
    eventsScope: 'pictures', eventBus: new EventBusSrv(), canExecuteActions: () => true,
  };
  return (
    <ThemeContext.Provider value={theme}>
      <GlobalStyles />
      <style>{STYLE}</style>
      <PanelContextProvider value={context}>
        <div style={{ padding: GAP, width: shown.width }}>
          <Head shown={shown} />
          <div style={{ position: 'relative', height: bottom * (CELL + GAP) - GAP }}>
            {shown.dashboard.panels.map((panel: any) => <Panel key={panel.id} shown={shown} panel={panel} />)}
          </div>
        </div>
      </PanelContextProvider>
    </ThemeContext.Provider>
  );
}

(window as any).unknownUnits = (units: string[]) =>
  units.filter((unit) => !/^(si|suffix|prefix):/.test(unit) && !(unit in getValueFormatterIndex()));

(window as any).show = async (address: string) => {
  const shown: Shown = await (await fetch(address)).json();
  await Promise.all([document.fonts.load('400 12px Inter'), document.fonts.load('500 12px Inter')]);
  createRoot(document.getElementById('page')!).render(<Page shown={shown} />);
};
