/** What Grafana fills in where a panel's JSON says nothing: the options that its plugins register, with their defaults. */

import { FieldConfigOptionsRegistry, FieldColorModeId, ThresholdsMode, type FieldConfigPropertyItem } from '@grafana/data';
import { cloneDeep, defaultsDeep } from 'lodash';

const STANDARD = {
  timeseries: { color: { mode: FieldColorModeId.PaletteClassic } },
  stat: { color: { mode: FieldColorModeId.Thresholds } },
  table: { color: { mode: FieldColorModeId.Thresholds } },
};
const THRESHOLDS = {
  mode: ThresholdsMode.Absolute,
  steps: [{ value: null, color: 'green' }, { value: 80, color: 'red' }],
};
const CUSTOM = {
  timeseries: {
    drawStyle: 'line',
    lineInterpolation: 'linear',
    lineWidth: 1,
    fillOpacity: 0,
    gradientMode: 'none',
    spanNulls: false,
    insertNulls: false,
    showPoints: 'auto',
    pointSize: 5,
    stacking: { mode: 'none', group: 'A' },
    axisPlacement: 'auto',
    axisLabel: '',
    axisColorMode: 'text',
    axisBorderShow: false,
    axisCenteredZero: false,
    scaleDistribution: { type: 'linear' },
    hideFrom: { tooltip: false, viz: false, legend: false },
    thresholdsStyle: { mode: 'off' },
  },
  stat: {},
  table: { align: 'auto', cellOptions: { type: 'auto' }, inspect: false },
};
const PROPERTIES = [
  'unit', 'min', 'max', 'fieldMinMax', 'decimals', 'displayName', 'noValue', 'color', 'thresholds', 'mappings', 'links', 'actions',
];
const MORE_CUSTOM = ['axisSoftMin', 'axisSoftMax', 'lineStyle', 'fillBelowTo', 'width', 'minWidth', 'wrapText', 'filterable'];

export type Kind = keyof typeof CUSTOM;

/** The field configuration of a panel, completed. */
export function completed(kind: Kind, fieldConfig: any): any {
  const config = cloneDeep(fieldConfig);
  config.defaults = defaultsDeep(config.defaults, STANDARD[kind], { custom: CUSTOM[kind], mappings: [] });
  config.defaults.thresholds ??= THRESHOLDS;
  for (const one of [config.defaults, ...config.overrides.flatMap((rule: any) => rule.properties.map((property: any) => property.value))]) {
    for (const step of one?.thresholds?.steps ?? one?.steps ?? []) {
      step.value ??= -Infinity;  // JSON has no infinity
    }
  }
  return config;
}

/** What overrides may set. */
export function registry(kind: Kind): FieldConfigOptionsRegistry {
  const item = (path: string, isCustom: boolean) =>
    ({
      id: isCustom ? `custom.${path}` : path,
      path,
      isCustom,
      name: path,
      process: (value: unknown) => value,
      shouldApply: () => true,
    }) as unknown as FieldConfigPropertyItem;
  const custom = [...Object.keys(CUSTOM[kind]), ...MORE_CUSTOM];
  return new FieldConfigOptionsRegistry(() => [
    ...PROPERTIES.map((path) => item(path, false)),
    ...custom.map((path) => item(path, true)),
  ]);
}
