// What a workflow saved of our nodes, in frontends that lose some of it.

/** Has a kind of node keep all its values. Frontends from 1.58 on count them before the tiles' widgets have come, and
 *  drop as many as there are buttons in the places of the last ones: with tiles, the last settings were at defaults. */
export function keepValues(kind) {
  const { configure } = kind.prototype;
  kind.prototype.configure = function (data, ...rest) {
    const saved = [...(data.widgets_values ?? [])];
    configure.call(this, data, ...rest);
    if (!(data.widgets_values?.length < saved.length)) return;
    for (const [place, value] of saved.entries()) {
      const widget = this.widgets.filter((one) => one.serialize !== false)[place];
      if (widget && widget.value !== value) widget.value = value;
    }
  };
}
